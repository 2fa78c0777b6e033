#include "client/src/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/answer_deadline.h"
#include "client/src/daemon_silence.h"
#include "client/src/fd_socket.h"
#include "client/src/fork_guard.h"
#include "client/src/layout_plan.h"
#include "client/src/layout_registration.h"
#include "client/src/mapped_memory.h"
#include "client/src/session_options.h"
#include "client/src/step_client.h"
#include "client/src/unix_socket.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

// A daemon that accepted the connection has this time to answer, even if connect_timeout is
// shorter.
constexpr absl::Duration kLeastPatience = absl::Seconds(1);
// The daemon itself reports a coordinator that it cannot reach in time. If it answers nothing until
// the rank's deadline and this, it does not answer at all.
constexpr absl::Duration kGrace = absl::Seconds(1);
// Between two attempts to join while the daemon restarts.
constexpr absl::Duration kRejoinPause = absl::Milliseconds(50);
// Long enough for a rank that leaves between steps: the daemon waits for nothing.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(30);
// The most bytes of a notice; the rest of a longer one is dropped.
constexpr std::size_t kMaxNoticeBytes = 2047;

absl::Status Lost(const SessionOptions& options, absl::string_view what) {
  ErrorFields fields;
  fields.job = options.job_id;
  fields.rank = options.rank;
  return MakeError(
      absl::StatusCode::kUnavailable, reason::kDaemonLost,
      absl::StrCat("rank ", options.rank, ": the daemon at ", options.socket, " was lost (", what,
                   "); start gradsyncd or look into its log, then join again"),
      fields);
}

}  // namespace

Connection::Connection(const SessionOptions& options)
    : options_(options), job_channel_(this), state_fetch_(this) {}

Connection::~Connection() = default;

// ---- Joining ------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const SessionOptions& options) {
  if (auto status = ValidateOptions(options); !status.ok()) return status;
  const absl::Time deadline = absl::Now() + std::max(options.connect_timeout, absl::ZeroDuration());
  for (;;) {
    auto connection = std::make_shared<Connection>(options);
    const absl::Status status = connection->Join(deadline);
    if (status.ok()) return connection;
    connection->Close();
    // The stream ended before its first answer, or the daemon drains and another may take its
    // place. Or this is a replacement, and the daemon does not know yet that the rank is lost.
    const std::string why = ErrorReason(status);
    const bool again =
        connection->stream_ != nullptr &&
        (why == reason::kDaemonLost || why == reason::kDraining ||
         (why == reason::kRankOccupied && options.on_rank_loss == LossPolicy::kHold));
    if (!again || absl::Now() + kRejoinPause >= deadline) return status;
    // Backs off: nothing announces another daemon, or that the rank is free.
    absl::SleepFor(kRejoinPause);
  }
}

absl::Status Connection::Join(absl::Time deadline) {
  FileDescriptor socket;
  if (auto status = OpenUnixSocket(SOCK_STREAM, &socket); !status.ok()) return status;
  if (auto status = ConnectUnixSocket(socket, options_.socket, Absent::kNotYet, deadline);
      !status.ok()) {
    return status;
  }
  auto stream = SessionStream::Open(std::move(socket), shared_from_this());
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  const absl::Duration patience = std::max(deadline - absl::Now(), kLeastPatience);
  const absl::Time answer_deadline = absl::Now() + patience + kGrace;
  v1::SessionRequest request;
  FillOpenSession(options_, request.mutable_open_session());
  request.mutable_open_session()->set_timeout_ms(TimeoutMs(patience));
  stream_->Send(std::move(request));
  {
    const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return opened_ || !end_.ok();
    };
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithDeadline(absl::Condition(&answered), answer_deadline)) {
      return MakeError(absl::StatusCode::kUnavailable, reason::kWaitTimeout,
                       absl::StrCat("the daemon at ", options_.socket,
                                    " accepted the connection but does not answer; check that "
                                    "gradsyncd is not stopped (gradsyncctl health)"),
                       Fields());
    }
    if (!end_.ok()) return end_;
  }
  auto descriptors =
      FetchDescriptors(FdSocketPath(options_.socket), staging_nonce_, 1, answer_deadline);
  if (!descriptors.ok()) {
    auto end = AwaitEnd(PatienceForReason(descriptors.status()));
    return end.ok() ? descriptors.status() : end;
  }
  auto staging = MappedMemory::Map((*descriptors)[0].get(), staging_bytes_, "staging memory");
  if (!staging.ok()) return staging.status();
  staging_ = std::make_shared<StagingMemory>(*std::move(staging), std::move((*descriptors)[0]));
  state_reader_.Open(this, options_.rank, staging_);
  return absl::OkStatus();
}

void Connection::OnOpened(const v1::SessionOpened& opened) {
  if (opened.replacement()) {
    job_channel_.OnReplacement();
    if (options_.state_source == StateSource::kSurvivor) state_fetch_.OnReplacement();
  }
  absl::MutexLock lock(&mutex_);
  if (opened_) return;
  incarnation_ = opened.incarnation();
  generation_ = opened.generation();
  replacement_ = opened.replacement();
  for (const v1::CurrentLayout& layout : opened.layouts()) {
    current_layouts_.push_back({SpecOf(layout.layout()), layout.step()});
  }
  // At most a year, so that sums do not overflow.
  lease_ = absl::Milliseconds(
      std::min<std::uint64_t>(opened.lease_ms(), absl::ToInt64Milliseconds(absl::Hours(24 * 365))));
  staging_nonce_ = opened.staging_nonce();
  staging_bytes_ = opened.staging_bytes();
  opened_ = true;
}

// ---- The end ------------------------------------------------------------------------------------

absl::Status Connection::End() const {
  absl::MutexLock lock(&mutex_);
  return end_;
}

absl::Status Connection::AwaitEnd(absl::Duration timeout) const {
  const auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !end_.ok(); };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&ended), timeout);
  return end_;
}

absl::Status Connection::AwaitGoodEnd(absl::string_view call) const {
  const auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !end_.ok(); };
  // Under kHold the daemon ends the session when every rank has left.
  const bool together = options_.on_rank_loss == LossPolicy::kHold;
  const absl::Time deadline = together ? absl::InfiniteFuture() : absl::Now() + kLeaveTimeout;
  DaemonSilence silence(*this);
  absl::MutexLock lock(&mutex_);
  if (AwaitUnlessSilent(&mutex_, absl::Condition(&ended), deadline, &silence) != Awaited::kMet) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
                     absl::StrCat("the daemon does not answer ", call,
                                  "; check that gradsyncd is not stopped (gradsyncctl health)"),
                     Fields());
  }
  return ErrorReason(end_) == reason::kLeft ? absl::OkStatus() : end_;
}

bool Connection::HasEnded() const {
  absl::MutexLock lock(&mutex_);
  return !ending_.ok();
}

void Connection::SetEnd(absl::Status end) {
  std::vector<std::shared_ptr<StepClient>> layouts;
  {
    absl::MutexLock lock(&mutex_);
    if (!ending_.ok()) return;
    ending_ = end;
    for (const auto& [channel, weak] : steps_) {
      if (auto steps = weak.lock()) layouts.push_back(std::move(steps));
    }
  }
  // First, because waits return the end only when nobody reads the state.
  state_reader_.Stop();
  for (const auto& steps : layouts) steps->OnSessionEnd(end);
  job_channel_.OnSessionEnd(end);
  state_fetch_.OnSessionEnd(end);
  absl::MutexLock lock(&mutex_);
  end_ = end;
  for (const auto& [id, registration] : registrations_) registration->OnFailed(end);
}

void Connection::OnStreamEnd(const StreamEnd& end) {
  const auto code = static_cast<absl::StatusCode>(end.code);
  if (code == absl::StatusCode::kOk) {
    SetEnd(left() ? MakeError(absl::StatusCode::kFailedPrecondition, reason::kLeft,
                              absl::StrCat("rank ", options_.rank, " has left the job"), Fields())
                  : Lost(options_, "it ended the session without a reason"));
    return;
  }
  absl::Status status = StatusFromTrailer(end.code, end.message, end.details);
  if (ErrorReason(status).empty()) {
    switch (code) {
      // gRPC reports a broken connection by these.
      case absl::StatusCode::kUnavailable:
      case absl::StatusCode::kCancelled:
      case absl::StatusCode::kUnknown:
      case absl::StatusCode::kInternal:
        status = Lost(options_, end.message);
        break;
      case absl::StatusCode::kUnimplemented:
        status = MakeError(code, reason::kProtocolViolation,
                           absl::StrCat("what listens at ", options_.socket,
                                        " is no gradsyncd of this release: ", end.message,
                                        "; check GRADSYNC_SOCKET, or install gradsyncd and this "
                                        "library from one release"),
                           Fields());
        break;
      default:
        break;
    }
  }
  SetEnd(std::move(status));
}

void Connection::Close() {
  SetEnd(MakeError(absl::StatusCode::kFailedPrecondition, reason::kClosed,
                   absl::StrCat("rank ", options_.rank, ": the Session was destroyed"), Fields()));
  state_reader_.AwaitStopped();
  if (stream_ != nullptr) stream_->Close();
}

absl::Status Connection::BeginLeave(absl::string_view call) {
  left_.store(true);
  std::vector<std::shared_ptr<StepClient>> layouts;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [channel, weak] : steps_) {
      if (auto steps = weak.lock()) layouts.push_back(std::move(steps));
    }
  }
  for (const auto& steps : layouts) {
    // A MarkReady that ran before left_ was set has opened its step by now.
    if (auto status = steps->CheckNoOpenStep(call); !status.ok()) {
      left_.store(false);
      return status;
    }
  }
  return absl::OkStatus();
}

// ---- Layouts ------------------------------------------------------------------------------------

std::uint64_t Connection::Announce(LayoutRegistration* registration) {
  absl::MutexLock lock(&mutex_);
  registrations_[++last_request_] = registration;
  if (!end_.ok()) registration->OnFailed(end_);
  return last_request_;
}

void Connection::Withdraw(std::uint64_t request_id) {
  absl::MutexLock lock(&mutex_);
  registrations_.erase(request_id);
}

void Connection::Attach(std::uint32_t channel, const std::shared_ptr<StepClient>& steps) {
  absl::Status end;
  {
    absl::MutexLock lock(&mutex_);
    for (auto it = steps_.begin(); it != steps_.end();) {
      it = it->second.expired() ? steps_.erase(it) : std::next(it);
    }
    steps_[channel] = steps;
    end = ending_;
  }
  if (!end.ok()) steps->OnSessionEnd(end);
}

std::shared_ptr<StepClient> Connection::StepsOf(std::uint32_t channel) {
  absl::MutexLock lock(&mutex_);
  const auto found = steps_.find(channel);
  return found == steps_.end() ? nullptr : found->second.lock();
}

void Connection::OnFailed(const v1::OperationFailed& failed) {
  absl::Status status = StatusFromProto(failed.status());
  if (status.ok()) {
    status = MakeError(absl::StatusCode::kInternal, reason::kProtocolViolation,
                       "the daemon failed an operation without a reason", Fields());
  }
  if (!failed.layout()) {
    job_channel_.OnOperationFailed(failed.sequence(), status);
    return;
  }
  absl::MutexLock lock(&mutex_);
  const auto found = registrations_.find(failed.sequence());
  if (found != registrations_.end()) found->second->OnFailed(status);
}

std::string Connection::TakeNotice() {
  absl::MutexLock lock(&notice_mutex_);
  return std::exchange(notice_, "");
}

void Connection::SetNotice(absl::string_view text) {
  absl::MutexLock lock(&notice_mutex_);
  notice_.assign(text.data(), std::min(text.size(), kMaxNoticeBytes));
}

// ---- The daemon's messages ----------------------------------------------------------------------

void Connection::OnMessage(const v1::SessionResponse& message) {
  heard_ns_.store(MonotonicNs(), std::memory_order_relaxed);
  // Any other message may end the wait.
  if (!message.has_lease_question()) SetNotice(message.still_waiting().text());
  if (OnStateMessage(message)) return;
  switch (message.kind_case()) {
    case v1::SessionResponse::kSessionOpened:
      OnOpened(message.session_opened());
      break;
    case v1::SessionResponse::kLayoutAssigned: {
      absl::MutexLock lock(&mutex_);
      const auto found = registrations_.find(message.layout_assigned().request_id());
      if (found != registrations_.end()) found->second->OnAssigned(message.layout_assigned());
      break;
    }
    case v1::SessionResponse::kLayoutReady: {
      absl::MutexLock lock(&mutex_);
      for (const auto& [id, registration] : registrations_) {
        if (registration->OnReady(message.layout_ready())) break;
      }
      break;
    }
    case v1::SessionResponse::kStepDone:
      if (const auto steps = StepsOf(message.step_done().channel())) {
        steps->OnStepDone(message.step_done());
      }
      job_channel_.OnStepDone(message.step_done());
      state_reader_.OnStepDone();
      break;
    case v1::SessionResponse::kStepState:
      if (const auto steps = StepsOf(message.step_state().channel())) {
        steps->OnStepState(message.step_state());
      }
      break;
    case v1::SessionResponse::kChunkReady:
      job_channel_.OnChunkReady(message.chunk_ready());
      break;
    case v1::SessionResponse::kOperationDone:
      job_channel_.OnOperationDone(message.operation_done().sequence());
      break;
    case v1::SessionResponse::kOperationFailed:
      OnFailed(message.operation_failed());
      break;
    case v1::SessionResponse::kLeaveDone:
      for (const v1::NextStep& next : message.leave_done().next_steps()) {
        if (const auto steps = StepsOf(next.channel())) steps->OnResume(next.step());
      }
      job_channel_.OnLeaveDone(message.leave_done());
      break;
    case v1::SessionResponse::kHealed:
      job_channel_.OnHealed(message.healed().next_sequence());
      break;
    case v1::SessionResponse::kLeaseQuestion: {
      v1::SessionRequest answer;
      answer.mutable_lease_answer()->set_number(message.lease_question().number());
      stream_->Send(std::move(answer));
      break;
    }
    case v1::SessionResponse::kSessionEnding:
      if (auto status = StatusFromProto(message.session_ending().status()); !status.ok()) {
        SetEnd(std::move(status));
      }
      break;
    case v1::SessionResponse::kStillWaiting:
    case v1::SessionResponse::kBucketDone:  // not asked for
    case v1::SessionResponse::KIND_NOT_SET:
    default:  // OnStateMessage
      break;
  }
}

bool Connection::OnStateMessage(const v1::SessionResponse& message) {
  switch (message.kind_case()) {
    case v1::SessionResponse::kStateQuestion:
      state_reader_.OnQuestion(message.state_question());
      return true;
    case v1::SessionResponse::kStateBegin:
      state_fetch_.OnBegin(message.state_begin());
      return true;
    case v1::SessionResponse::kStateChunk:
      if (message.state_chunk().write()) {
        state_reader_.OnChunk(message.state_chunk());
      } else {
        state_fetch_.OnChunk(message.state_chunk());
      }
      return true;
    case v1::SessionResponse::kStateAdmitted:
      state_fetch_.OnAdmitted(message.state_admitted().transfer());
      return true;
    case v1::SessionResponse::kStateCancelled:
      state_reader_.OnCancelled(message.state_cancelled().transfer());
      state_fetch_.OnCancelled(message.state_cancelled().transfer());
      return true;
    case v1::SessionResponse::kStateFailed:
      state_fetch_.OnFailed(message.state_failed());
      return true;
    default:
      return false;
  }
}

void Connection::SendState(v1::SessionRequest request) { stream_->Send(std::move(request)); }

}  // namespace gradsync::client
