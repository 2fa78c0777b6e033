#include "client/src/state_fetch.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/answer_deadline.h"
#include "client/src/connection.h"
#include "client/src/daemon_silence.h"
#include "client/src/error.h"
#include "client/src/session_options.h"
#include "client/src/staging_memory.h"
#include "client/src/state_image.h"
#include "client/src/state_reader.h"
#include "client/src/utf8.h"
#include "gradsync/duration_text.h"
#include "gradsync/limits.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
absl::Status StateFetch::OutOfOrder(absl::string_view what) const {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                   absl::StrCat("rank ", connection_.options().rank, ": ", what),
                   connection_.Fields());
}

absl::Status StateFetch::Broken(absl::string_view what) const {
  return MakeError(absl::StatusCode::kInternal, reason::kProtocolViolation,
                   absl::StrCat("rank ", connection_.options().rank, ": the daemon ", what,
                                "; look into its log, and join again"),
                   connection_.Fields());
}

absl::Status StateFetch::Refuse(std::uint64_t transfer, const absl::Status& why) {
  v1::SessionRequest request;
  request.mutable_state_refused()->set_transfer(transfer);
  request.mutable_state_refused()->set_reason(ValidUtf8(why.message().substr(0, kMaxReasonBytes)));
  connection_.stream().Send(std::move(request));
  return why;
}

absl::Status StateFetch::NotFetchedInTime() const {
  return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kStateUnavailable,
                   absl::StrCat("rank ", connection_.options().rank,
                                ": no rank has given the state of the model in time; "
                                "FetchState can be repeated"),
                   connection_.Fields());
}

absl::Status StateFetch::NotConfirmedInTime(absl::Duration timeout) const {
  return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
                   absl::StrCat("rank ", connection_.options().rank,
                                ": the other ranks have not confirmed the state within ",
                                DurationText(timeout), "; call ConfirmState again"),
                   connection_.Fields());
}

bool StateFetch::BeginCall(absl::Time deadline) {
  const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !in_call_; };
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithDeadline(absl::Condition(&ended), deadline)) return false;
  in_call_ = true;
  return true;
}

void StateFetch::EndCall() {
  absl::MutexLock lock(&mutex_);
  in_call_ = false;
}

// ---- Fetch --------------------------------------------------------------------------------------

absl::Status StateFetch::BeginFetch() {
  absl::MutexLock lock(&mutex_);
  if (!end_.ok()) return end_;
  if (!loading()) {
    return OutOfOrder(
        "FetchState needs a session that takes the place of a lost one, with "
        "StateSource::kSurvivor, and only once; see is_replacement()");
  }
  // The trainer could not load the state that it had fetched: the daemon begins again.
  if (transfer_.has_value() && transfer_->fetched) {
    transfer_.reset();
    phase_ = Phase::kLoading;
  }
  return absl::OkStatus();
}

absl::Status StateFetch::Ask(absl::Duration timeout) {
  if (phase_.load() == Phase::kAsked) return absl::OkStatus();
  // The daemon writes chunks there.
  if (auto status = connection_.staging().Populate(); !status.ok()) return status;
  v1::SessionRequest request;
  request.mutable_fetch_state()->set_timeout_ms(
      timeout == absl::InfiniteDuration() ? 0 : TimeoutMs(timeout));
  absl::MutexLock lock(&mutex_);
  phase_ = Phase::kAsked;
  failed_ = absl::OkStatus();
  connection_.stream().Send(std::move(request));
  return absl::OkStatus();
}

absl::StatusOr<StateFetch::Transfer> StateFetch::AwaitChunk(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return (transfer_.has_value() && transfer_->chunk.has_value()) || !failed_.ok() || !end_.ok();
  };
  DaemonSilence silence(connection_);
  const Awaited awaited =
      AwaitUnlessSilent(&mutex_, absl::Condition(&answered), deadline, &silence);
  if (!end_.ok()) return end_;
  if (!failed_.ok()) return std::exchange(failed_, absl::OkStatus());
  if (awaited == Awaited::kSilent) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonSilent,
                     absl::StrCat("rank ", connection_.options().rank, ": ", silence.Description(),
                                  "; FetchState can be repeated"),
                     connection_.Fields());
  }
  if (awaited == Awaited::kTimedOut) return NotFetchedInTime();
  return *transfer_;
}

absl::StatusOr<StateImage> StateFetch::Fetch(absl::Duration timeout) {
  const absl::Time deadline = AnswerDeadline(timeout);
  if (!BeginCall(deadline)) return NotFetchedInTime();
  const absl::Cleanup end_call = [this] { EndCall(); };
  if (auto status = BeginFetch(); !status.ok()) return status;
  // After a call that timed out the daemon may still write a chunk there. Nobody overwrites it: no
  // operation takes the memory before this session has healed.
  StagingMemory& staging = connection_.staging();
  if (!staging.Acquire(deadline, nullptr)) return NotFetchedInTime();
  const StagingTurn staging_turn(&staging);
  if (auto status = Ask(timeout); !status.ok()) return status;
  std::shared_ptr<std::byte> memory;
  std::optional<std::uint64_t> number;  // of the transfer whose bytes are in `memory`
  for (;;) {
    auto transfer = AwaitChunk(deadline);
    if (!transfer.ok()) return transfer.status();
    if (number != transfer->number) {
      memory = NewImageMemory(transfer->bytes);
      number = transfer->number;
      if (memory == nullptr) {
        return Refuse(
            transfer->number,
            MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                      absl::StrCat("rank ", connection_.options().rank, " cannot allocate ",
                                   transfer->bytes,
                                   " bytes for the state of the model; raise its memory limit"),
                      connection_.Fields()));
      }
    }
    const Chunk chunk = *transfer->chunk;
    if (chunk.number != transfer->chunks || chunk.bytes == 0 || chunk.bytes > staging.size() ||
        chunk.bytes > transfer->bytes - transfer->received) {
      return Broken("sent an impossible chunk of the state");
    }
    std::memcpy(memory.get() + transfer->received, staging.data(), chunk.bytes);
    absl::MutexLock lock(&mutex_);
    // Begun anew meanwhile: these bytes are void.
    if (!transfer_.has_value() || transfer_->number != *number) continue;
    transfer_->chunk.reset();
    ++transfer_->chunks;
    transfer_->received += chunk.bytes;
    v1::SessionRequest request;
    request.mutable_state_read()->set_transfer(*number);
    request.mutable_state_read()->set_chunk(chunk.number);
    connection_.stream().Send(std::move(request));
    if (transfer_->received < transfer_->bytes) continue;
    auto image = ParseImage(transfer_->source, std::move(memory), transfer_->bytes);
    if (!image.ok()) return Refuse(*number, image.status());
    transfer_->fetched = true;
    return image;
  }
}

// ---- Confirm ------------------------------------------------------------------------------------

absl::Status StateFetch::Confirm(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::uint64_t number = 0;
  const auto interrupted = [this] {
    return MakeError(
        absl::StatusCode::kAborted, reason::kStateInterrupted,
        absl::StrCat("rank ", connection_.options().rank,
                     ": the transfer ended while this rank loaded the state: the step became "
                     "void, or a rank that took part was lost or refused; call FetchState again, "
                     "and load what it returns"),
        connection_.Fields());
  };
  if (!connection_.state_reader().serves()) {
    return OutOfOrder("ConfirmState reads the state that ServeState names; call that first");
  }
  // First of all: a call that was left may wait for a reading that was paused then.
  const StatePin pin(&connection_.state_reader());
  if (!BeginCall(deadline)) return NotConfirmedInTime(timeout);
  const absl::Cleanup end_call = [this] { EndCall(); };
  {
    absl::MutexLock lock(&mutex_);
    if (!end_.ok()) return end_;
    if (!failed_.ok()) return std::exchange(failed_, absl::OkStatus());
    if (phase_ == Phase::kAdmitted) return absl::OkStatus();  // after an earlier call had timed out
    if (!loading()) {
      return OutOfOrder("ConfirmState follows FetchState, in a session that replaces a lost one");
    }
    if (!transfer_.has_value() || !transfer_->fetched) {
      if (phase_ == Phase::kAsked) return interrupted();
      return OutOfOrder("ConfirmState follows FetchState");
    }
    number = transfer_->number;
  }
  connection_.state_reader().SendDigests(number);
  absl::MutexLock lock(&mutex_);
  const auto answered = [this, number]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !loading() || !transfer_.has_value() || transfer_->number != number || !failed_.ok() ||
           !end_.ok();
  };
  DaemonSilence silence(connection_);
  const Awaited awaited =
      AwaitUnlessSilent(&mutex_, absl::Condition(&answered), deadline, &silence);
  if (!loading()) return absl::OkStatus();
  if (!end_.ok()) return end_;
  if (!failed_.ok()) return std::exchange(failed_, absl::OkStatus());
  if (awaited == Awaited::kMet) return interrupted();
  if (awaited == Awaited::kSilent) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonSilent,
                     absl::StrCat("rank ", connection_.options().rank, ": ", silence.Description(),
                                  "; ConfirmState can be repeated"),
                     connection_.Fields());
  }
  return NotConfirmedInTime(timeout);
}

// ---- The daemon's messages ----------------------------------------------------------------------

void StateFetch::OnReplacement() {
  absl::MutexLock lock(&mutex_);
  phase_ = Phase::kLoading;
}

void StateFetch::OnBegin(const v1::StateBegin& begin) {
  absl::MutexLock lock(&mutex_);
  if (!loading()) return;
  transfer_ = Transfer{begin.transfer(), begin.bytes(), begin.source()};
}

void StateFetch::OnChunk(const v1::StateChunk& chunk) {
  absl::MutexLock lock(&mutex_);
  if (!transfer_.has_value() || transfer_->number != chunk.transfer()) return;
  transfer_->chunk = Chunk{chunk.chunk(), chunk.bytes()};
}

void StateFetch::OnCancelled(std::uint64_t transfer) {
  absl::MutexLock lock(&mutex_);
  if (transfer_.has_value() && transfer_->number == transfer) transfer_.reset();
}

void StateFetch::OnAdmitted(std::uint64_t transfer) {
  absl::MutexLock lock(&mutex_);
  if (!transfer_.has_value() || transfer_->number != transfer) return;
  phase_ = Phase::kAdmitted;
  transfer_.reset();
}

void StateFetch::OnFailed(const v1::StateFailed& failed) {
  absl::Status status = StatusFromProto(failed.status());
  absl::MutexLock lock(&mutex_);
  failed_ = status.ok() ? Broken("failed FetchState without a reason") : std::move(status);
  if (phase_ == Phase::kAsked) phase_ = Phase::kLoading;
  transfer_.reset();
}

void StateFetch::OnSessionEnd(const absl::Status& end) {
  absl::MutexLock lock(&mutex_);
  end_ = end;
}

}  // namespace gradsync::client
