#include "daemon/rpc/session_handler.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {
namespace {

// A killed process closes its connection microseconds before it ends. The wait only decides how its
// loss is described.
constexpr int kExitPatienceMs = 5;

}  // namespace

SessionHandler::SessionHandler(const SessionContext& context, ClientProcess process,
                               std::weak_ptr<SessionReplies> replies)
    : RankPort({context.memory, process.tenant()}),
      context_(context),
      process_(std::move(process)),
      replies_(std::move(replies)) {}

void SessionHandler::Handle(const v1::SessionRequest& request) {
  const std::uint64_t now_ns = context_.clock->NowNs();
  if (session_ == nullptr) TakeArrived();
  if (session_ != nullptr) session_->Heard(now_ns);
  const absl::Status status = Take(request, now_ns);
  if (status.ok()) return;
  if (session_ == nullptr) return Refuse(status);
  LogRefusal(status);
  context_.sessions->EndForBreach(session_, status);  // comes back as SessionEndMessage
}

void SessionHandler::TakeArrived() {
  MutexLock lock(&mutex_);
  session_ = std::move(arrived_);
}

absl::Status SessionHandler::Take(const v1::SessionRequest& request, std::uint64_t now_ns) {
  if (request.has_open_session()) return Open(request.open_session());
  if (session_ == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     "the first message of a session must be OpenSession");
  }
  if (request.has_lease_answer()) return absl::OkStatus();  // Session::Heard() has noted it
  return TakeRankRequest(request, context_.limits, now_ns, this);
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
  bool ended = false;
  {
    MutexLock lock(&mutex_);
    ended = stream_ended_;
    if (!ended && opened.ok()) arrived_ = *opened;
  }
  if (!opened.ok()) {
    if (!ended) Refuse(opened.status());  // otherwise there is nobody to tell
    return;
  }
  const std::shared_ptr<Session> session = *std::move(opened);
  if (ended) {
    context_.sessions->ConnectionClosed(
        session, MakeError(absl::StatusCode::kAborted, reason::kStreamEnded,
                           absl::StrCat("its connection was closed (pid ", process_.pid,
                                        ") while it joined")));
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
              {"uid", process_.tenant()},
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
  answer->set_replacement(CameBack(session->job().StateOf(session->identity().session())));
  for (const CurrentLayout& layout : session->job().CurrentLayouts(session->identity().session())) {
    Encode(layout, answer->add_layouts());
  }
  Respond(std::move(response));
}

// ---- RegisterLayout

absl::Status SessionHandler::RegisterLayout(LayoutRequest request) {
  const std::uint64_t request_id = request.request_id;
  session_->RegisterLayout(std::move(request), [self = shared_from_this(), session = session_,
                                                request_id](const auto& registration) {
    const absl::Status status = self->LayoutRegistered(session, request_id, registration);
    if (!status.ok()) session->End(status);
  });
  return absl::OkStatus();
}

absl::Status SessionHandler::LayoutRegistered(
    const std::shared_ptr<Session>& session, std::uint64_t request_id,
    const absl::StatusOr<Session::Registration>& registration) {
  if (!registration.ok()) {
    RefuseLayout(request_id, registration.status());
    return absl::OkStatus();
  }
  v1::SessionResponse response;
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
  Assign(session, std::move(response));
  return absl::OkStatus();
}

void SessionHandler::Assign(const std::shared_ptr<Session>& session, v1::SessionResponse response) {
  const auto replies = replies_.lock();
  if (replies == nullptr) return;
  const v1::LayoutAssigned& assigned = response.layout_assigned();
  const std::uint64_t request_id = assigned.request_id();
  const std::uint32_t channel = assigned.channel();
  const std::string size = absl::StrCat(assigned.placements_size(), " parameters and ",
                                        assigned.buckets_size(), " buckets");
  const absl::Status granted = replies->TryRespond(std::move(response));
  if (granted.ok()) return;
  const absl::Status why =
      MakeError(granted.code(), DetailsOf(granted),
                absl::StrCat("rank ", rank_, " of job '", job_id_,
                             "' cannot be sent the plan of a layout of ", size, ": ",
                             granted.message(), ". Raise that quota, or make the layout smaller."));
  session->job().RefuseLayout(session->identity().session(), channel, why);
  RefuseLayout(request_id, why);
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
  const RankState state = session_->job().StateOf(session());
  const bool left = state == RankState::kExited || state == RankState::kFinished;
  const bool known = left || !end.ok();
  const absl::Status closed = ClosedError(known ? 0 : kExitPatienceMs, disconnected);
  // The job's reason, if the job ended the session first.
  const absl::Status why = end.ok() ? closed : end;
  LogLimited(left ? LogLevel::kInfo : LogLevel::kWarning, "session ended",
             {{"job", job_id_},
              {"rank", rank_},
              {"uid", process_.tenant()},
              {"step", DetailsOf(why).Value(field::kStep)},
              {"bucket", DetailsOf(why).Value(field::kBucket)},
              {"why", left ? "left" : why.message()}});
  // The session holds the stream as its sink.
  const bool waits_for_process = context_.sessions->IsClosed(*session_);
  if (known && !waits_for_process) {
    context_.sessions->End(std::move(session_), closed);
  } else {
    context_.sessions->ConnectionClosed(std::move(session_), closed);
  }
  session_ = nullptr;
}

void SessionHandler::LogIfVoid(const v1::StepDone& done) const {
  if (done.verdict() == v1::VERDICT_COMPLETE) return;
  const absl::Status verdict = FromProto(done.status());
  LogLimited(LogLevel::kWarning, "step void",
             {{"job", job_id_},
              {"rank", rank_},
              {"uid", process_.tenant()},
              {"channel", done.channel()},
              {"step", done.step()},
              {"bucket", DetailsOf(verdict).Value(field::kBucket)},
              {"why", verdict.message()}});
}

void SessionHandler::LogRefusal(const absl::Status& why) const {
  LogLimited(LogLevel::kWarning, "session refused",
             {{"job", job_id_},
              {"rank", rank_},
              {"uid", process_.tenant()},
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
