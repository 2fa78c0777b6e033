#include "daemon/rpc/session_handler.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// A killed process closes its connection microseconds before it ends. The wait only decides how its
// loss is described.
constexpr int kExitPatienceMs = 5;

}  // namespace

SessionHandler::SessionHandler(const SessionContext& context, ClientProcess process,
                               std::weak_ptr<SessionReplies> replies)
    : context_(context), process_(std::move(process)), replies_(std::move(replies)) {}

void SessionHandler::Handle(const v1::SessionRequest& request) {
  const std::uint64_t now_ns = context_.clock->NowNs();
  if (session_ == nullptr) TakeArrived();
  if (session_ != nullptr) session_->Heard(now_ns);
  const absl::Status status = Dispatch(request, now_ns);
  if (status.ok()) return;
  if (session_ == nullptr) return Refuse(status);
  LogRefusal(status);
  session_->End(status);  // comes back to the stream as SessionEndMessage
}

void SessionHandler::TakeArrived() {
  MutexLock lock(&mutex_);
  session_ = std::move(arrived_);
}

absl::Status SessionHandler::Dispatch(const v1::SessionRequest& request, std::uint64_t now_ns) {
  if (request.kind_case() == v1::SessionRequest::kOpenSession) return Open(request.open_session());
  if (session_ == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     "the first message of a session is OpenSession");
  }
  JobPort& job = session_->job();
  const std::uint32_t rank = session_->rank();
  const std::uint64_t staging_bytes = context_.sessions->policy().staging_bytes;
  switch (request.kind_case()) {
    case v1::SessionRequest::kBucketReady:
      return MarkReady(request.bucket_ready());
    case v1::SessionRequest::kEndStep:
      return EndStep(request.end_step());
    case v1::SessionRequest::kAbandonStep:
      return AbandonStep(request.abandon_step());
    case v1::SessionRequest::kRegisterLayout:
      return RegisterLayout(request.register_layout(), now_ns);
    case v1::SessionRequest::kArenaMapped:
      return session_->ArenaMapped(request.arena_mapped().channel());
    case v1::SessionRequest::kBroadcast:
      return Operate(DecodeBroadcast(request.broadcast(), staging_bytes, now_ns));
    case v1::SessionRequest::kBarrier:
      return Operate(DecodeBarrier(request.barrier(), now_ns));
    case v1::SessionRequest::kAllReduce:
      return Operate(DecodeAllReduce(request.all_reduce(), staging_bytes, now_ns));
    case v1::SessionRequest::kChunkWritten: {
      const auto& chunk = request.chunk_written();
      return job.ChunkWritten(rank, chunk.sequence(), chunk.chunk(), chunk.bytes());
    }
    case v1::SessionRequest::kChunkRead:
      return job.ChunkRead(rank, request.chunk_read().sequence(), request.chunk_read().chunk());
    case v1::SessionRequest::kLeave:
      return job.Leave(rank, request.leave().exit());
    case v1::SessionRequest::kLeaseAnswer:
      return absl::OkStatus();  // Session::Heard() has noted it
    case v1::SessionRequest::kQueryStep:
      QueryStep(request.query_step());
      return absl::OkStatus();
    case v1::SessionRequest::kOpenSession:
    case v1::SessionRequest::KIND_NOT_SET:
      break;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   "a message of no kind that this daemon knows");
}

absl::Status SessionHandler::MarkReady(const v1::BucketReady& ready) {
  return session_->MarkReady(
      ready.channel(), ready.step(),
      absl::MakeConstSpan(ready.buckets().data(), static_cast<std::size_t>(ready.buckets_size())));
}

absl::Status SessionHandler::EndStep(const v1::EndStep& end) {
  if (end.ready_rest()) return session_->FinishStep(end.channel(), end.step(), end.used_map());
  return session_->EndStep(end.channel(), end.step(), end.used_map());
}

absl::Status SessionHandler::AbandonStep(const v1::AbandonStep& abandon) {
  if (abandon.reason().size() > kMaxReasonBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("AbandonStep.reason has ", abandon.reason().size(), " bytes; ",
                                  kMaxReasonBytes, " allowed"));
  }
  return session_->job().AbandonStep(session_->rank(), abandon.channel(), abandon.step(),
                                     abandon.reason());
}

void SessionHandler::QueryStep(const v1::QueryStep& query) {
  const std::uint32_t channel = query.channel();
  const std::uint64_t step = query.step();
  session_->job().AskMissing(channel, step,
                             [self = shared_from_this(), channel, step](std::string missing) {
                               v1::SessionResponse response;
                               auto* state = response.mutable_step_state();
                               state->set_channel(channel);
                               state->set_step(step);
                               state->set_missing(std::move(missing));
                               self->Respond(std::move(response));
                             });
}

absl::Status SessionHandler::Operate(const absl::StatusOr<OperationRequest>& request) {
  if (!request.ok()) return request.status();
  auto staging = session_->Staging(request->staging_bytes);
  if (!staging.ok()) return staging.status();
  return session_->job().Operate(session_->rank(), request->sequence, request->spec,
                                 *std::move(staging), request->deadline_ns);
}

// ---- OpenSession

absl::Status SessionHandler::Open(const v1::OpenSession& message) {
  if (opened_.load()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     "OpenSession a second time");
  }
  std::uint32_t protocol = 0;
  const auto request = DecodeOpen(message, &protocol);
  if (!request.ok()) return request.status();
  job_id_ = request->job_id;
  rank_ = request->rank;
  opened_.store(true);
  context_.sessions->Open(process_, *request, replies_.lock(),
                          [self = shared_from_this(), protocol, world_size = request->world_size](
                              absl::StatusOr<std::shared_ptr<Session>> opened) {
                            self->Opened(protocol, world_size, std::move(opened));
                          });
  return absl::OkStatus();
}

void SessionHandler::Opened(std::uint32_t protocol, std::uint32_t world_size,
                            absl::StatusOr<std::shared_ptr<Session>> opened) {
  if (!opened.ok()) return Refuse(opened.status());
  const std::shared_ptr<Session> session = *std::move(opened);
  bool ended = false;
  {
    MutexLock lock(&mutex_);
    ended = stream_ended_;
    if (!ended) arrived_ = session;
  }
  if (ended) {
    context_.sessions->End(session, MakeError(absl::StatusCode::kAborted, reason::kStreamEnded,
                                              absl::StrCat("its connection was closed (pid ",
                                                           process_.pid, ") while it joined")));
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
              {"uid", process_.uid},
              {"pid", process_.pid}});
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

// ---- RegisterLayout

absl::Status SessionHandler::RegisterLayout(const v1::RegisterLayout& message,
                                            std::uint64_t now_ns) {
  auto request = DecodeLayout(message, context_.limits, now_ns);
  if (request.ok() && request->replaces != 0) {
    const absl::Status may = session_->job().CheckReplaces(session_->rank(), request->replaces);
    if (!may.ok()) return may;
  }
  const std::uint64_t request_id = message.request_id();
  if (!request.ok()) return LayoutRegistered(session_, request_id, request.status());
  if (!session_->job().coordinator().empty()) {
    request->message = std::make_shared<const v1::RegisterLayout>(message);
  }
  session_->RegisterLayout(*std::move(request), [self = shared_from_this(), session = session_,
                                                 request_id](const auto& registration) {
    const absl::Status status = self->LayoutRegistered(session, request_id, registration);
    if (!status.ok()) session->End(status);
  });
  return absl::OkStatus();
}

// Answers RegisterLayout. A refusal is an answer too: the session goes on.
absl::Status SessionHandler::LayoutRegistered(
    const std::shared_ptr<Session>& session, std::uint64_t request_id,
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

// ---- The end

absl::Status SessionHandler::ClosedError(int patience_ms, const std::string& disconnected) const {
  if (!disconnected.empty()) {
    return MakeError(
        absl::StatusCode::kAborted, reason::kStreamEnded,
        absl::StrCat("the daemon disconnected it (pid ", process_.pid, "): ", disconnected));
  }
  if (HasEnded(process_, patience_ms)) return ProcessEndedError(process_);
  return MakeError(
      absl::StatusCode::kAborted, reason::kStreamEnded,
      absl::StrCat("its connection was closed (pid ", process_.pid, ") without Leave"));
}

void SessionHandler::StreamEnded(const absl::Status& end, const std::string& disconnected) {
  {
    MutexLock lock(&mutex_);
    stream_ended_ = true;
    if (session_ == nullptr) session_ = std::move(arrived_);
  }
  if (session_ == nullptr) return;
  const bool left = session_->job().StateOf(session_->rank()) == RankState::kExited;
  const bool known = left || !end.ok();
  const absl::Status closed = ClosedError(known ? 0 : kExitPatienceMs, disconnected);
  // The job's reason, if the job ended the session first.
  const absl::Status why = end.ok() ? closed : end;
  LogLimited(left ? LogLevel::kInfo : LogLevel::kWarning, "session ended",
             {{"job", job_id_},
              {"rank", rank_},
              {"step", DetailsOf(why).Value(field::kStep)},
              {"bucket", DetailsOf(why).Value(field::kBucket)},
              {"why", left ? "left" : why.message()}});
  context_.sessions->End(std::move(session_), closed);  // it holds the stream as its sink
  session_ = nullptr;
}

void SessionHandler::LogIfVoid(const v1::StepDone& done) const {
  if (done.verdict() == v1::VERDICT_COMPLETE) return;
  const absl::Status verdict = FromProto(done.status());
  LogLimited(LogLevel::kWarning, "step void",
             {{"job", job_id_},
              {"rank", rank_},
              {"channel", done.channel()},
              {"step", done.step()},
              {"bucket", DetailsOf(verdict).Value(field::kBucket)},
              {"why", verdict.message()}});
}

void SessionHandler::LogRefusal(const absl::Status& why) const {
  LogLimited(LogLevel::kWarning, "session refused: bad request",
             {{"job", job_id_},
              {"rank", rank_},
              {"uid", process_.uid},
              {"pid", process_.pid},
              {"why", why.message()}});
}

void SessionHandler::Refuse(const absl::Status& why) {
  LogRefusal(why);
  const auto replies = replies_.lock();
  if (replies == nullptr) return;
  replies->Queue(SessionEndMessage{why});
  replies->Flush();
}

void SessionHandler::Respond(v1::SessionResponse response) {
  if (const auto replies = replies_.lock()) replies->Respond(std::move(response));
}

}  // namespace gradsync::daemon
