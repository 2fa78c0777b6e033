#include "daemon/rpc/gradsync_service.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <deque>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "gradsync/v1/gradsync.grpc.pb.h"

namespace gradsync {
namespace {

// A client that does not read is cut off at this many messages; the protocol itself never has more than a few hundred open.
constexpr std::size_t kMaxQueued = 16384;
// How long a client has to take the end of its session before the stream is cancelled.
constexpr std::uint64_t kEndPatienceNs = 1'000'000'000;

}  // namespace

// One trainer's stream. gRPC calls the On...() methods one at a time per kind; jobs queue messages from any thread. At most one
// write is in flight, and no lock is held while gRPC is called: it may call back from within.
class SessionStream final : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>,
                            public SessionSink,
                            public std::enable_shared_from_this<SessionStream> {
 public:
  SessionStream(const ServiceContext& context, grpc::CallbackServerContext* call)
      : context_(context), call_(call) {}

  // Keeps itself alive until OnDone().
  void Start() {
    self_ = shared_from_this();
    const auto peer = context_.connections->Find(call_->peer());
    if (!peer.has_value()) {
      End(MakeError(absl::StatusCode::kUnavailable, "CREDENTIALS",
                    "the connection has closed, or is not one of the daemon's socket"));
      return;
    }
    peer_ = *peer;
    StartRead(&request_);
  }

  // ---- SessionSink
  void Queue(SessionMessage message) override {
    MutexLock lock(&mutex_);
    if (ended_) return;
    if (queue_.size() >= kMaxQueued) {
      overflow_.store(true);
      return;
    }
    if (auto* end = std::get_if<SessionEndMessage>(&message)) {
      ended_ = true;
      end_ = end->status;
      ended_ns_ = context_.clock->NowNs();
      if (end_.ok()) return;  // the stream's own OK says it
    }
    queue_.emplace_back(std::move(message));
  }

  void Flush() override {
    bool finish = false;
    {
      MutexLock lock(&mutex_);
      if (writing_ || finished_) return;
      if (queue_.empty() || broken_) {
        if (!ended_) return;
        finished_ = finish = true;
      } else {
        writing_ = true;
        outgoing_ = std::move(queue_.front());
        queue_.pop_front();
      }
    }
    if (finish) {
      Finish(ToGrpc(end_));  // constant once ended_
      return;
    }
    if (auto* message = std::get_if<SessionMessage>(&outgoing_)) {
      Encode(*message, &response_);
    } else {
      response_ = std::move(std::get<v1::SessionResponse>(outgoing_));
    }
    StartWrite(&response_);
  }

  // ---- grpc::ServerBidiReactor
  void OnReadDone(bool ok) override {
    if (!ok) {
      StreamEnded();
      return;
    }
    if (overflow_.load()) {
      call_->TryCancel();
    } else {
      const std::uint64_t now_ns = context_.clock->NowNs();
      if (session_ != nullptr) session_->Heard(now_ns);
      if (const absl::Status status = Dispatch(now_ns); !status.ok()) Breach(status);
    }
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      broken_ = broken_ || !ok;
    }
    Flush();
  }

  void OnDone() override { self_.reset(); }

  // Cancels the stream if the client has not taken its end.
  void Tick(std::uint64_t now_ns) {
    {
      MutexLock lock(&mutex_);
      const bool overdue = ended_ && now_ns > ended_ns_ + kEndPatienceNs;
      if (done_reading_ || (!overdue && !overflow_.load())) return;
    }
    call_->TryCancel();
  }

 private:
  // Ends the stream with `status`, after what is queued.
  void End(const absl::Status& status) {
    Queue(SessionEndMessage{status});
    Flush();
  }

  void Breach(const absl::Status& status) {
    LogLimited(LogLevel::kWarning, "session ended: bad request",
               {{"uid", peer_.uid}, {"pid", peer_.pid}, {"why", status.message()}});
    if (session_ != nullptr) {
      session_->End(status);  // comes back as SessionEndMessage
    } else {
      End(status);
    }
  }

  void StreamEnded() {
    {
      MutexLock lock(&mutex_);
      done_reading_ = true;
    }
    if (session_ != nullptr) {
      const absl::Status why =
          HasEnded(peer_) ? ProcessEndedError(peer_)
                          : MakeError(absl::StatusCode::kAborted, "STREAM_ENDED",
                                      absl::StrCat("its connection was closed (pid ", peer_.pid,
                                                   ") without Leave"));
      const bool had_left = session_->job().StateOf(session_->rank()) == RankState::kExited;
      const std::string job = session_->job().identity().job_id;
      Log(had_left ? LogLevel::kInfo : LogLevel::kWarning,
          had_left ? "session closed" : "session lost",
          {{"job", job}, {"rank", session_->rank()}, {"why", had_left ? "left" : why.message()}});
      context_.sessions->Gone(session_, why);
    }
    // Nobody reads any more: whatever is queued goes nowhere.
    End(MakeError(absl::StatusCode::kCancelled, "STREAM_ENDED", "the client closed the stream"));
  }

  void Respond(v1::SessionResponse response) {
    {
      MutexLock lock(&mutex_);
      if (ended_) return;
      queue_.emplace_back(std::move(response));
    }
    Flush();
  }

  absl::Status Dispatch(std::uint64_t now_ns);
  absl::Status Open(const v1::OpenSession& message);
  absl::Status RegisterLayout(const v1::RegisterLayout& message, std::uint64_t now_ns);
  absl::Status Operate(const absl::StatusOr<OperationRequest>& request);

  const ServiceContext& context_;
  grpc::CallbackServerContext* const call_;
  std::shared_ptr<SessionStream> self_;

  // The read side's own.
  v1::SessionRequest request_;
  PeerProcess peer_;
  std::shared_ptr<Session> session_;

  // The writer's own, between `writing_ = true` and OnWriteDone().
  using Outgoing = std::variant<SessionMessage, v1::SessionResponse>;
  Outgoing outgoing_;
  v1::SessionResponse response_;

  std::atomic<bool> overflow_{false};
  Mutex mutex_;
  std::deque<Outgoing> queue_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;        // a write failed
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;         // nothing more is queued
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;      // Finish() was called
  bool done_reading_ ABSL_GUARDED_BY(mutex_) = false;  // the client is gone: nothing to cancel
  std::uint64_t ended_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status end_;  // written once, before ended_
};

absl::Status SessionStream::Dispatch(std::uint64_t now_ns) {
  const v1::SessionRequest& request = request_;
  if (request.kind_case() == v1::SessionRequest::kOpenSession) return Open(request.open_session());
  if (session_ == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION",
                     "the first message of a session is OpenSession");
  }
  Job& job = session_->job();
  const std::uint32_t rank = session_->rank();
  switch (request.kind_case()) {
    case v1::SessionRequest::kBucketReady: {
      const auto& ready = request.bucket_ready();
      return job.MarkReady(rank, ready.channel(), ready.step(),
                           absl::MakeConstSpan(ready.buckets().data(),
                                               static_cast<std::size_t>(ready.buckets_size())));
    }
    case v1::SessionRequest::kEndStep: {
      const auto& end = request.end_step();
      return session_->EndStep(end.channel(), end.step(), end.used_map());
    }
    case v1::SessionRequest::kAbandonStep: {
      const auto& abandon = request.abandon_step();
      return job.AbandonStep(rank, abandon.channel(), abandon.step(),
                             absl::string_view(abandon.reason()).substr(0, 1024));
    }
    case v1::SessionRequest::kRegisterLayout:
      return RegisterLayout(request.register_layout(), now_ns);
    case v1::SessionRequest::kArenaMapped:
      return session_->ArenaMapped(request.arena_mapped().channel());
    case v1::SessionRequest::kBroadcast:
      return Operate(
          DecodeBroadcast(request.broadcast(), context_.sessions->policy().staging_bytes, now_ns));
    case v1::SessionRequest::kBarrier:
      return Operate(DecodeBarrier(request.barrier(), now_ns));
    case v1::SessionRequest::kAllReduce:
      return Operate(
          DecodeAllReduce(request.all_reduce(), context_.sessions->policy().staging_bytes, now_ns));
    case v1::SessionRequest::kChunkWritten: {
      const auto& chunk = request.chunk_written();
      return job.ChunkWritten(rank, chunk.sequence(), chunk.chunk(), chunk.bytes());
    }
    case v1::SessionRequest::kChunkRead:
      return job.ChunkRead(rank, request.chunk_read().sequence(), request.chunk_read().chunk());
    case v1::SessionRequest::kLeave:
      return job.Leave(rank, request.leave().exit());
    case v1::SessionRequest::kLeaseAnswer:
      return absl::OkStatus();  // Heard() has taken it
    case v1::SessionRequest::kQueryStep: {
      v1::SessionResponse response;
      auto* state = response.mutable_step_state();
      state->set_channel(request.query_step().channel());
      state->set_step(request.query_step().step());
      state->set_missing(job.MissingInStep(state->channel(), state->step()));
      Respond(std::move(response));
      return absl::OkStatus();
    }
    case v1::SessionRequest::kOpenSession:
    case v1::SessionRequest::KIND_NOT_SET:
      break;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED",
                   "a message of no kind that this daemon knows");
}

absl::Status SessionStream::Open(const v1::OpenSession& message) {
  if (session_ != nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION",
                     "OpenSession a second time");
  }
  std::uint32_t protocol = 0;
  const auto request = DecodeOpen(message, &protocol);
  if (!request.ok()) return request.status();
  auto session = context_.sessions->Open(peer_, *request, shared_from_this());
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  const auto nonce = context_.sessions->Offer(
      *session_, {{session_->staging(), session_->staging()->fd()}});
  if (!nonce.ok()) return nonce.status();
  Log(LogLevel::kInfo, "session opened",
      {{"job", request->job_id},
       {"rank", request->rank},
       {"world_size", request->world_size},
       {"generation", session_->job().identity().generation},
       {"uid", peer_.uid},
       {"pid", peer_.pid}});
  v1::SessionResponse response;
  auto* opened = response.mutable_session_opened();
  opened->set_protocol(protocol);
  opened->set_incarnation(session_->identity().incarnation);
  opened->set_generation(session_->job().identity().generation);
  opened->set_staging_nonce(*nonce);
  opened->set_staging_bytes(context_.sessions->policy().staging_bytes);
  opened->set_lease_ms(context_.sessions->policy().lease_ns / 1'000'000);
  opened->set_daemon(context_.daemon_version);
  Respond(std::move(response));
  return absl::OkStatus();
}

absl::Status SessionStream::RegisterLayout(const v1::RegisterLayout& message,
                                           std::uint64_t now_ns) {
  v1::SessionResponse response;
  const auto refuse = [&](const absl::Status& status) {
    auto* failed = response.mutable_operation_failed();
    failed->set_sequence(message.request_id());
    failed->set_layout(true);
    *failed->mutable_status() = ToProto(status);
    Respond(std::move(response));
    return absl::OkStatus();  // the session lives on
  };
  auto request = DecodeLayout(message, context_.limits, now_ns);
  if (!request.ok()) return refuse(request.status());
  const auto registration = session_->RegisterLayout(*std::move(request));
  if (!registration.ok()) return refuse(registration.status());
  const auto& memory = registration->memory;
  const auto nonce = context_.sessions->Offer(
      *session_,
      {{memory.arena, memory.arena->fd()}, {memory.semaphores, memory.semaphores->fd()}});
  if (!nonce.ok()) return nonce.status();
  auto* assigned = response.mutable_layout_assigned();
  assigned->set_request_id(message.request_id());
  assigned->set_channel(registration->channel);
  assigned->set_nonce(*nonce);
  assigned->set_arena_bytes(registration->plan.arena_bytes);
  for (const PlannedBucket& bucket : registration->plan.buckets) {
    auto* out = assigned->add_buckets();
    out->set_dtype(static_cast<v1::DataType>(bucket.dtype));
    out->set_count(bucket.count);
    out->set_offset(bucket.offset);
  }
  for (const PlannedParameter& placement : registration->plan.placements) {
    auto* out = assigned->add_placements();
    out->set_bucket(placement.bucket);
    out->set_offset(placement.offset);
  }
  Respond(std::move(response));
  return absl::OkStatus();
}

absl::Status SessionStream::Operate(const absl::StatusOr<OperationRequest>& request) {
  if (!request.ok()) return request.status();
  auto staging = session_->Staging(request->staging_bytes);
  if (!staging.ok()) return staging.status();
  return session_->job().Operate(session_->rank(), request->sequence, request->spec,
                                 *std::move(staging), request->deadline_ns);
}

void StreamRegistry::Add(std::weak_ptr<SessionStream> stream) {
  MutexLock lock(&mutex_);
  streams_.push_back(std::move(stream));
}

void StreamRegistry::Tick(std::uint64_t now_ns) {
  std::vector<std::shared_ptr<SessionStream>> open;
  {
    MutexLock lock(&mutex_);
    std::vector<std::weak_ptr<SessionStream>> kept;
    for (const auto& stream : streams_) {
      if (auto live = stream.lock()) {
        kept.push_back(stream);
        open.push_back(std::move(live));
      }
    }
    streams_ = std::move(kept);
  }
  for (const auto& stream : open) stream->Tick(now_ns);
}

bool StreamRegistry::Empty() {
  MutexLock lock(&mutex_);
  for (const auto& stream : streams_) {
    if (!stream.expired()) return false;
  }
  return true;
}

namespace {

class GradsyncService final : public v1::GradientSync::CallbackService {
 public:
  GradsyncService(const ServiceContext& context, StreamRegistry* registry)
      : context_(context), registry_(registry) {}

  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* Session(
      grpc::CallbackServerContext* call) override {
    const auto stream = std::make_shared<SessionStream>(context_, call);
    registry_->Add(stream);
    SessionStream* const raw = stream.get();
    raw->Start();
    return raw;
  }

 private:
  const ServiceContext context_;
  StreamRegistry* const registry_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeGradsyncService(const ServiceContext& context,
                                                   StreamRegistry* registry) {
  return std::make_unique<GradsyncService>(context, registry);
}

}  // namespace gradsync
