#include "daemon/rpc/gradsync_service.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <deque>
#include <functional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/mutex.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "gradsync/v1/gradsync.grpc.pb.h"

namespace gradsync {
namespace {

// A client that does not read is cut off at this many messages; the protocol itself never has more
// than a few hundred open.
constexpr std::size_t kMaxQueued = 16384;
// Of these, answers to its own requests, which may be larger: layouts and queries.
constexpr std::size_t kMaxAnswersQueued = 256;
// A stream that does not open a session within this is cancelled.
constexpr std::uint64_t kOpenPatienceNs = 30'000'000'000;
// How long a client has to take the end of its session before the stream is cancelled.
constexpr std::uint64_t kEndPatienceNs = 1'000'000'000;

constexpr std::size_t kMaxReasonBytes = 1024;
// Between a killed process's closed connection and its end lie microseconds; this only decides how
// the loss is described.
constexpr int kExitPatienceMs = 5;

std::string FieldOf(const absl::Status& status, absl::string_view key) {
  for (const auto& [name, value] : DetailsOf(status).fields) {
    if (name == key) return value;
  }
  return "";
}

// A completion queue's tag: what to do when the operation is complete.
class Completion {
 public:
  virtual void Run(bool ok) = 0;

 protected:
  ~Completion() = default;
};

}  // namespace

// One trainer's stream. Reads complete one at a time; jobs queue messages from any thread. At most
// one write is in flight, and no lock is held while gRPC is called.
//
// Owns itself from Accept() until its last operation is complete; jobs and sessions share it as
// their sink.
class SessionStream final : public SessionSink, public std::enable_shared_from_this<SessionStream> {
 public:
  using Accepted = std::function<void(std::shared_ptr<SessionStream>, bool ok)>;

  explicit SessionStream(const ServiceContext& context) : context_(context) {}

  // Takes the next call; `accepted` is told when it has come, or that none will.
  void Accept(v1::GradientSync::AsyncService* service, grpc::ServerCompletionQueue* queue,
              Accepted accepted) {
    self_ = shared_from_this();
    accepted_ = std::move(accepted);
    service->RequestSession(&call_, &stream_, queue, queue, &on_accept_);
  }

  // ---- SessionSink
  void Queue(SessionMessage message) override {
    MutexLock lock(&mutex_);
    if (ended_) return;
    if (auto* end = std::get_if<SessionEndMessage>(&message)) {
      ended_ = true;
      end_ = end->status;
      ended_ns_ = context_.clock->NowNs();
      // Nobody reads it: a stream that was cut off, or the stream's own OK says it.
      if (overflow_.load()) queue_.clear();
      if (overflow_.load() || end_.ok()) return;
    } else if (queue_.size() >= kMaxQueued) {
      overflow_.store(true);
      return;
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
      ++pending_;
    }
    if (finish) {
      stream_.Finish(ToGrpc(end_), &on_finish_);  // end_ is constant once ended_
      return;
    }
    if (auto* message = std::get_if<SessionMessage>(&outgoing_)) {
      if (const auto* done = std::get_if<StepDoneMessage>(message)) LogIfVoid(*done);
      Encode(*message, &response_);
    } else {
      response_ = std::move(std::get<v1::SessionResponse>(outgoing_));
      MutexLock lock(&mutex_);
      --answers_queued_;
    }
    stream_.Write(response_, &on_write_);
  }

  // Cancels the stream if the client has not taken its end.
  void Tick(std::uint64_t now_ns) {
    {
      MutexLock lock(&mutex_);
      const bool overdue = (ended_ && now_ns > ended_ns_ + kEndPatienceNs) ||
                           (!opened_.load() && now_ns > accepted_ns_ + kOpenPatienceNs);
      if (done_reading_ || (!overdue && !overflow_.load())) return;
    }
    call_.TryCancel();
  }

 private:
  template <void (SessionStream::*method)(bool)>
  class Step final : public Completion {
   public:
    explicit Step(SessionStream* stream) : stream_(stream) {}
    void Run(bool ok) override { (stream_->*method)(ok); }

   private:
    SessionStream* const stream_;
  };

  void OnAccept(bool ok) {
    const auto keep = std::move(self_);
    if (ok) self_ = keep;
    accepted_ns_ = context_.clock->NowNs();
    accepted_(keep, ok);
    accepted_ = nullptr;
    if (!ok) return;
    const auto peer = context_.connections->Find(call_.peer());
    if (peer.has_value()) {
      peer_ = *peer;
      Read();
    } else {
      End(MakeError(absl::StatusCode::kUnavailable, "CREDENTIALS",
                    "the connection has closed, or is not one of the daemon's socket"));
    }
  }

  void Read() {
    {
      MutexLock lock(&mutex_);
      ++pending_;
    }
    stream_.Read(&request_, &on_read_);
  }

  void OnRead(bool ok) {
    const auto keep = self_;
    if (!ok) {
      StreamEnded();
    } else {
      if (overflow_.load()) {
        call_.TryCancel();
      } else if (!Ended()) {
        const std::uint64_t now_ns = context_.clock->NowNs();
        if (session_ == nullptr) TakeArrived();
        if (session_ != nullptr) session_->Heard(now_ns);
        if (const absl::Status status = Dispatch(now_ns); !status.ok()) Breach(status);
      }
      Read();
    }
    Completed();
  }

  void OnWrite(bool ok) {
    const auto keep = self_;
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      broken_ = broken_ || !ok;
    }
    Flush();
    Completed();
  }

  void OnFinish(bool) { Completed(); }

  bool Ended() {
    MutexLock lock(&mutex_);
    return ended_;
  }

  void TakeArrived() {
    MutexLock lock(&mutex_);
    session_ = std::move(arrived_);
  }

  // One operation is complete; after the last one the stream lets go of itself.
  void Completed() {
    std::shared_ptr<SessionStream> last;
    MutexLock lock(&mutex_);
    if (--pending_ == 0 && finished_) last.swap(self_);
  }

  // Ends the stream with `status`, after what is queued.
  void End(const absl::Status& status) {
    Queue(SessionEndMessage{status});
    Flush();
  }

  // A bad request: the session, or the attempt at one, ends with `status`.
  void Breach(const absl::Status& status) {
    if (session_ == nullptr) return Refuse(status);
    LogRefusal(status);
    session_->End(status);  // comes back as SessionEndMessage
  }

  void Refuse(const absl::Status& status) {
    LogRefusal(status);
    End(status);
  }

  void LogRefusal(const absl::Status& status) {
    LogLimited(LogLevel::kWarning, "session refused: bad request",
               {{"job", job_id_},
                {"rank", rank_},
                {"uid", peer_.uid},
                {"pid", peer_.pid},
                {"why", status.message()}});
  }

  void StreamEnded() {
    absl::Status ended;
    {
      MutexLock lock(&mutex_);
      done_reading_ = true;
      if (ended_) ended = end_;
      if (session_ == nullptr) session_ = std::move(arrived_);
    }
    if (session_ != nullptr) {
      const bool left = session_->job().StateOf(session_->rank()) == RankState::kExited;
      const bool told = left || !ended.ok();
      const absl::Status closed = HasEnded(peer_, told ? 0 : kExitPatienceMs)
                                      ? ProcessEndedError(peer_)
                                      : MakeError(absl::StatusCode::kAborted, "STREAM_ENDED",
                                                  absl::StrCat("its connection was closed (pid ",
                                                               peer_.pid, ") without Leave"));
      // What ended it: the job, if it came first; else the client.
      const absl::Status why = ended.ok() ? closed : ended;
      LogLimited(left ? LogLevel::kInfo : LogLevel::kWarning, "session ended",
                 {{"job", job_id_},
                  {"rank", rank_},
                  {"step", FieldOf(why, "step")},
                  {"bucket", FieldOf(why, "bucket")},
                  {"why", left ? "left" : why.message()}});
      context_.sessions->Gone(std::move(session_), closed);  // it holds this stream as its sink
      session_ = nullptr;
    }
    // Nobody reads any more: whatever is queued goes nowhere.
    End(MakeError(absl::StatusCode::kCancelled, "STREAM_ENDED", "the client closed the stream"));
  }

  // Each rank's line: they tell which ranks have been told.
  void LogIfVoid(const StepDoneMessage& done) {
    const absl::Status& verdict = done.record->verdict;
    if (verdict.ok()) return;
    LogLimited(LogLevel::kWarning, "step void",
               {{"job", job_id_},
                {"rank", rank_},
                {"channel", done.channel},
                {"step", done.record->times.step},
                {"bucket", FieldOf(verdict, "bucket")},
                {"why", verdict.message()}});
  }

  void Respond(v1::SessionResponse response) {
    {
      MutexLock lock(&mutex_);
      if (ended_) return;
      if (++answers_queued_ > kMaxAnswersQueued) {
        overflow_.store(true);
        return;
      }
      queue_.emplace_back(std::move(response));
    }
    Flush();
  }

  absl::Status Dispatch(std::uint64_t now_ns);
  absl::Status Open(const v1::OpenSession& message);
  void Opened(std::uint32_t protocol, std::uint32_t world_size,
              absl::StatusOr<std::shared_ptr<Session>> opened);
  absl::Status RegisterLayout(const v1::RegisterLayout& message, std::uint64_t now_ns);
  absl::Status Assign(const std::shared_ptr<Session>& session, std::uint64_t request_id,
                      const absl::StatusOr<Session::Registration>& registration);
  absl::Status Operate(const absl::StatusOr<OperationRequest>& request);

  const ServiceContext& context_;
  grpc::ServerContext call_;
  grpc::ServerAsyncReaderWriter<v1::SessionResponse, v1::SessionRequest> stream_{&call_};
  Step<&SessionStream::OnAccept> on_accept_{this};
  Step<&SessionStream::OnRead> on_read_{this};
  Step<&SessionStream::OnWrite> on_write_{this};
  Step<&SessionStream::OnFinish> on_finish_{this};
  Accepted accepted_;
  std::shared_ptr<SessionStream> self_;

  // The read side's own.
  v1::SessionRequest request_;
  PeerProcess peer_;
  std::shared_ptr<Session> session_;
  // Of the session, for the writer's log lines; constant once it is open.
  std::string job_id_;
  std::uint32_t rank_ = 0;

  // The writer's own, between `writing_ = true` and OnWriteDone().
  using Outgoing = std::variant<SessionMessage, v1::SessionResponse>;
  Outgoing outgoing_;
  v1::SessionResponse response_;

  std::atomic<bool> overflow_{false};
  std::atomic<bool> opened_{false};
  std::uint64_t accepted_ns_ = 0;  // constant once the stream is known to others
  Mutex mutex_;
  std::shared_ptr<Session> arrived_ ABSL_GUARDED_BY(mutex_);  // until the read side takes it
  std::deque<Outgoing> queue_ ABSL_GUARDED_BY(mutex_);
  std::size_t answers_queued_ ABSL_GUARDED_BY(mutex_) = 0;  // v1::SessionResponse in queue_
  int pending_ ABSL_GUARDED_BY(mutex_) = 0;  // operations that gRPC has not completed
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
  JobPort& job = session_->job();
  const std::uint32_t rank = session_->rank();
  switch (request.kind_case()) {
    case v1::SessionRequest::kBucketReady: {
      const auto& ready = request.bucket_ready();
      return session_->MarkReady(
          ready.channel(), ready.step(),
          absl::MakeConstSpan(ready.buckets().data(),
                              static_cast<std::size_t>(ready.buckets_size())));
    }
    case v1::SessionRequest::kEndStep: {
      const auto& end = request.end_step();
      if (end.ready_rest()) {
        return session_->FinishStep(end.channel(), end.step(), end.used_map());
      }
      return session_->EndStep(end.channel(), end.step(), end.used_map());
    }
    case v1::SessionRequest::kAbandonStep: {
      const auto& abandon = request.abandon_step();
      if (abandon.reason().size() > kMaxReasonBytes) {
        return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED",
                         absl::StrCat("AbandonStep.reason has ", abandon.reason().size(),
                                      " bytes; ", kMaxReasonBytes, " allowed"));
      }
      return job.AbandonStep(rank, abandon.channel(), abandon.step(), abandon.reason());
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
      const std::uint32_t channel = request.query_step().channel();
      const std::uint64_t step = request.query_step().step();
      job.AskMissing(channel, step, [self = shared_from_this(), channel, step](std::string who) {
        v1::SessionResponse response;
        auto* state = response.mutable_step_state();
        state->set_channel(channel);
        state->set_step(step);
        state->set_missing(std::move(who));
        self->Respond(std::move(response));
      });
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
  if (opened_.load()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION",
                     "OpenSession a second time");
  }
  std::uint32_t protocol = 0;
  const auto request = DecodeOpen(message, &protocol);
  if (!request.ok()) return request.status();
  job_id_ = request->job_id;
  rank_ = request->rank;
  opened_.store(true);
  context_.sessions->Open(peer_, *request, shared_from_this(),
                          [self = shared_from_this(), protocol, world_size = request->world_size](
                              absl::StatusOr<std::shared_ptr<Session>> opened) {
                            self->Opened(protocol, world_size, std::move(opened));
                          });
  return absl::OkStatus();
}

void SessionStream::Opened(std::uint32_t protocol, std::uint32_t world_size,
                           absl::StatusOr<std::shared_ptr<Session>> opened) {
  if (!opened.ok()) return Refuse(opened.status());
  const std::shared_ptr<Session> session = *std::move(opened);
  bool gone = false;
  {
    MutexLock lock(&mutex_);
    gone = done_reading_;
    if (!gone) arrived_ = session;
  }
  if (gone) {
    context_.sessions->Gone(session, MakeError(absl::StatusCode::kAborted, "STREAM_ENDED",
                                               absl::StrCat("its connection was closed (pid ",
                                                            peer_.pid, ") while it joined")));
    return;
  }
  const auto nonce =
      context_.sessions->Offer(*session, {{session->staging(), session->staging()->fd()}});
  if (!nonce.ok()) return session->End(nonce.status());
  LogLimited(LogLevel::kInfo, "session opened",
             {{"job", job_id_},
              {"rank", rank_},
              {"world_size", world_size},
              {"generation", session->identity().generation},
              {"uid", peer_.uid},
              {"pid", peer_.pid}});
  v1::SessionResponse response;
  auto* answer = response.mutable_session_opened();
  answer->set_protocol(protocol);
  answer->set_incarnation(session->identity().incarnation);
  answer->set_generation(session->identity().generation);
  answer->set_staging_nonce(*nonce);
  answer->set_staging_bytes(context_.sessions->policy().staging_bytes);
  answer->set_lease_ms(context_.sessions->policy().lease_ns / 1'000'000);
  answer->set_daemon(context_.daemon_version);
  Respond(std::move(response));
}

absl::Status SessionStream::RegisterLayout(const v1::RegisterLayout& message,
                                           std::uint64_t now_ns) {
  auto request = DecodeLayout(message, context_.limits, now_ns);
  if (request.ok() && request->replaces != 0) {
    const absl::Status may = session_->job().CheckReplaces(session_->rank(), request->replaces);
    if (!may.ok()) return may;
  }
  if (!request.ok()) return Assign(session_, message.request_id(), request.status());
  session_->RegisterLayout(*std::move(request),
                           [self = shared_from_this(), session = session_,
                            id = message.request_id()](const auto& registration) {
                             const auto assigned = self->Assign(session, id, registration);
                             if (!assigned.ok()) session->End(assigned);
                           });
  return absl::OkStatus();
}

// Answers RegisterLayout. A refusal is no error: the session lives on.
absl::Status SessionStream::Assign(const std::shared_ptr<Session>& session,
                                   std::uint64_t request_id,
                                   const absl::StatusOr<Session::Registration>& registration) {
  v1::SessionResponse response;
  if (!registration.ok()) {
    auto* failed = response.mutable_operation_failed();
    failed->set_sequence(request_id);
    failed->set_layout(true);
    *failed->mutable_status() = ToProto(registration.status());
    Respond(std::move(response));
    return absl::OkStatus();
  }
  const auto& memory = registration->memory;
  std::vector<SessionTable::Descriptor> descriptors;
  auto* assigned = response.mutable_layout_assigned();
  Encode(registration->plan, assigned);
  if (memory.gpu == nullptr) {
    descriptors.push_back({memory.arena, memory.arena->fd()});
  } else {
    if (memory.gpu->fd() >= 0) descriptors.push_back({memory.gpu, memory.gpu->fd()});
    Encode(*memory.gpu, assigned);
  }
  descriptors.push_back({memory.semaphores, memory.semaphores->fd()});
  const auto nonce = context_.sessions->Offer(*session, descriptors);
  if (!nonce.ok()) return nonce.status();
  assigned->set_request_id(request_id);
  assigned->set_channel(registration->channel);
  assigned->set_nonce(*nonce);
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

// The queue's threads: one could be reducing a small bucket while the other takes the next message.
constexpr int kThreads = 2;
// How long Stop() waits for streams to end after the server has cancelled them.
constexpr absl::Duration kStopPatience = absl::Seconds(5);

class GradsyncService::Impl {
 public:
  explicit Impl(const ServiceContext& context) : context_(context) {}

  void Register(grpc::ServerBuilder* builder) {
    builder->RegisterService(&service_);
    queue_ = builder->AddCompletionQueue();
  }

  void Start() {
    AcceptNext();
    for (int i = 0; i < kThreads; ++i) {
      threads_.emplace_back([this] {
        void* tag = nullptr;
        bool ok = false;
        while (queue_->Next(&tag, &ok)) static_cast<Completion*>(tag)->Run(ok);
      });
    }
  }

  std::vector<std::shared_ptr<SessionStream>> Open() {
    MutexLock lock(&mutex_);
    std::vector<std::weak_ptr<SessionStream>> kept;
    std::vector<std::shared_ptr<SessionStream>> open;
    for (const auto& stream : streams_) {
      if (auto live = stream.lock()) {
        kept.push_back(stream);
        open.push_back(std::move(live));
      }
    }
    streams_ = std::move(kept);
    return open;
  }

  void Stop() {
    if (queue_ == nullptr) return;
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    const absl::Time deadline = absl::Now() + kStopPatience;
    // Once, at the daemon's end: streams let go of themselves and tell nobody.
    while (!Open().empty() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    queue_->Shutdown();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    queue_.reset();
  }

 private:
  void AcceptNext() {
    const auto next = std::make_shared<SessionStream>(context_);
    MutexLock lock(&mutex_);
    if (stopping_) return;
    next->Accept(&service_, queue_.get(), [this](std::shared_ptr<SessionStream> stream, bool ok) {
      if (!ok) return;  // the server stops
      {
        MutexLock accepted(&mutex_);
        streams_.push_back(stream);
      }
      AcceptNext();
    });
  }

  const ServiceContext context_;
  v1::GradientSync::AsyncService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::vector<std::thread> threads_;

  Mutex mutex_;
  std::vector<std::weak_ptr<SessionStream>> streams_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

GradsyncService::GradsyncService(const ServiceContext& context)
    : impl_(std::make_unique<Impl>(context)) {}
GradsyncService::~GradsyncService() = default;

void GradsyncService::Register(grpc::ServerBuilder* builder) { impl_->Register(builder); }
void GradsyncService::Start() { impl_->Start(); }
void GradsyncService::Tick(std::uint64_t now_ns) {
  for (const auto& stream : impl_->Open()) stream->Tick(now_ns);
}
bool GradsyncService::Idle() { return impl_->Open().empty(); }
void GradsyncService::Stop() { impl_->Stop(); }

}  // namespace gradsync
