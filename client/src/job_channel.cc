#include "client/src/job_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/answer_deadline.h"
#include "client/src/connection.h"
#include "client/src/daemon_silence.h"
#include "client/src/error.h"
#include "client/src/session_options.h"
#include "client/src/staging_memory.h"
#include "client/src/state_reader.h"
#include "client/src/utf8.h"
#include "gradsync/duration_text.h"
#include "proto/gradsync/limits.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
absl::Status JobChannel::Refused(absl::string_view what) const {
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   absl::StrCat("rank ", connection_.options().rank, ": ", what),
                   connection_.Fields());
}

absl::Status JobChannel::LeftError(absl::string_view what) const {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kLeft,
                   absl::StrCat("rank ", connection_.options().rank, " has left: ", what,
                                " until LeaveAndStay returns"),
                   connection_.Fields());
}

absl::Status JobChannel::TakeTurn(absl::Time deadline) {
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !turn_taken_; };
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithDeadline(absl::Condition(&idle), deadline)) {
    return MakeError(
        absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
        absl::StrCat("rank ", connection_.options().rank,
                     " still runs an operation that another thread has called, so this call has "
                     "not begun; call it again"),
        connection_.Fields());
  }
  turn_taken_ = true;
  return absl::OkStatus();
}

void JobChannel::EndTurn() {
  absl::MutexLock lock(&mutex_);
  turn_taken_ = false;
}

absl::Status JobChannel::AwaitHealed(absl::Time deadline) {
  if (healed_) return absl::OkStatus();
  const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return healed_ || !MayHeal() || !end_.ok();
  };
  DaemonSilence silence(connection_);
  const Awaited awaited =
      AwaitUnlessSilent(&mutex_, absl::Condition(&answered), TimeoutEnd(deadline), &silence);
  if (awaited == Awaited::kSilent) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonSilent,
                     absl::StrCat("rank ", connection_.options().rank, ": ", silence.Description(),
                                  "; the operation has not begun, call it again"),
                     connection_.Fields());
  }
  if (awaited == Awaited::kTimedOut) {
    return MakeError(
        absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
        absl::StrCat("rank ", connection_.options().rank,
                     " takes the place of a lost process and takes part in no operation yet: its "
                     "first step is not complete, or it has not registered every layout of the "
                     "job. Call it again"),
        connection_.Fields());
  }
  if (!end_.ok()) return end_;
  if (healed_) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
      absl::StrCat("rank ", connection_.options().rank,
                   " takes the place of a lost process: it takes part in no Barrier, Broadcast or "
                   "AllReduce before the EndStep of its first complete step. Skip those at the "
                   "program's start if the session is a replacement, and those of a void step"),
      connection_.Fields());
}

absl::Status JobChannel::AwaitMayBegin(absl::Time deadline) {
  if (!end_.ok()) return end_;
  if (auto status = AwaitHealed(deadline); !status.ok()) return status;
  if (!given_up_.ok()) return given_up_;
  if (connection_.left()) return LeftError("it takes part in no operation");
  return absl::OkStatus();
}

absl::StatusOr<std::uint64_t> JobChannel::Begin(
    absl::Time deadline,
    const std::function<void(std::uint64_t, std::uint64_t, v1::SessionRequest*)>& fill) {
  absl::MutexLock lock(&mutex_);
  if (auto status = AwaitMayBegin(deadline); !status.ok()) return status;
  ++sequence_;
  done_ = false;
  failed_ = absl::OkStatus();
  chunk_.reset();
  v1::SessionRequest request;
  fill(sequence_, TimeoutMs(TimeoutEnd(deadline) - absl::Now()), &request);
  connection_.stream().Send(std::move(request));
  return sequence_;
}

absl::StatusOr<std::optional<JobChannel::Chunk>> JobChannel::AwaitChunk(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return chunk_.has_value() || done_ || !failed_.ok() || !end_.ok();
  };
  DaemonSilence silence(connection_);
  const Awaited awaited =
      AwaitUnlessSilent(&mutex_, absl::Condition(&answered), deadline, &silence);
  if (awaited == Awaited::kSilent) {
    return GiveUp(absl::StatusCode::kUnavailable, reason::kDaemonSilent, silence.Description());
  }
  if (awaited == Awaited::kTimedOut) {
    return GiveUp(absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
                  "the daemon did not answer in time; check that gradsyncd is not stopped "
                  "(gradsyncctl health)");
  }
  if (!failed_.ok()) return failed_;
  // Done counts, also if the session ended right after it.
  if (chunk_.has_value() || done_) return std::exchange(chunk_, std::nullopt);
  return end_;
}

absl::Status JobChannel::GiveUp(absl::StatusCode code, Reason reason, absl::string_view why) {
  given_up_ = MakeError(
      code, reason,
      absl::StrCat("rank ", connection_.options().rank, " gave up on operation ", sequence_, ": ",
                   why,
                   ". Other ranks may still complete it, so this session takes no more Barrier, "
                   "Broadcast or AllReduce: join again for those."),
      connection_.Fields());
  return given_up_;
}

absl::Status JobChannel::AwaitDone(absl::Time deadline) {
  // For the root, the last chunk's ChunkReady may arrive before OperationDone.
  for (;;) {
    const auto chunk = AwaitChunk(deadline);
    if (!chunk.ok()) return chunk.status();
    if (!chunk->has_value()) return absl::OkStatus();
  }
}

absl::Status JobChannel::AcquireStaging(absl::Time deadline) {
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = AwaitMayBegin(deadline); !status.ok()) return status;
  }
  StagingMemory& staging = connection_.staging();
  if (!staging.Acquire(absl::InfinitePast(), nullptr)) {
    // The transfer goes on while this rank waits for its end.
    const StatePin pin(&connection_.state_reader());
    if (!staging.Acquire(deadline, nullptr)) {
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
          absl::StrCat("rank ", connection_.options().rank,
                       " gives the state of the model to a replacement, so its staging memory is "
                       "in use; call it when the step is complete"),
          connection_.Fields());
    }
  }
  auto status = staging.Populate();
  if (!status.ok()) staging.Release();
  return status;
}

absl::Status JobChannel::Barrier(absl::Duration timeout) {
  const absl::Time deadline = AnswerDeadline(timeout);
  if (auto status = TakeTurn(TimeoutEnd(deadline)); !status.ok()) return status;
  const Turn turn(this);
  const auto sequence =
      Begin(deadline, [](std::uint64_t number, std::uint64_t left_ms, v1::SessionRequest* request) {
        request->mutable_barrier()->set_sequence(number);
        request->mutable_barrier()->set_timeout_ms(left_ms);
      });
  return sequence.ok() ? AwaitDone(deadline) : sequence.status();
}

absl::Status JobChannel::Broadcast(std::byte* data, std::size_t bytes, std::uint32_t root,
                                   absl::Duration timeout) {
  if (root >= connection_.options().world_size && root != kLowestLiveRank) {
    return Refused(absl::StrCat("broadcast from root ", root, " in a world of ",
                                connection_.options().world_size, " ranks"));
  }
  if (data == nullptr && bytes > 0) return Refused("broadcast of a null pointer");
  const absl::Time deadline = AnswerDeadline(timeout);
  if (auto status = TakeTurn(TimeoutEnd(deadline)); !status.ok()) return status;
  const Turn turn(this);
  if (auto status = AcquireStaging(deadline); !status.ok()) return status;
  const StagingTurn staging_turn(&connection_.staging());
  const auto sequence = Begin(deadline, [bytes, root](std::uint64_t number, std::uint64_t left_ms,
                                                      v1::SessionRequest* request) {
    v1::Broadcast& broadcast = *request->mutable_broadcast();
    broadcast.set_sequence(number);
    broadcast.set_root(root);
    broadcast.set_bytes(bytes);
    broadcast.set_timeout_ms(left_ms);
  });
  if (!sequence.ok()) return sequence.status();
  const bool known = root != kLowestLiveRank;
  bool write = root == connection_.options().rank;
  for (std::size_t moved = 0; moved < bytes;) {
    // The root waits too: others may still read the staging memory.
    const auto ready = AwaitChunk(deadline);
    if (!ready.ok()) return ready.status();
    if (!ready->has_value()) return Broken("ended a broadcast before its last chunk");
    if (moved == 0 && !known) write = (*ready)->write;
    if ((*ready)->write != write) return Broken("took another rank for the root of a broadcast");
    const auto size = MoveChunk(*sequence, **ready, data + moved, bytes - moved);
    if (!size.ok()) return size.status();
    moved += *size;
  }
  return AwaitDone(deadline);
}

absl::Status JobChannel::Broken(absl::string_view what) const {
  return MakeError(absl::StatusCode::kInternal, reason::kProtocolViolation,
                   absl::StrCat("rank ", connection_.options().rank, ": the daemon ", what,
                                "; look into its log, and join again"),
                   connection_.Fields());
}

absl::StatusOr<std::size_t> JobChannel::MoveChunk(std::uint64_t sequence, const Chunk& chunk,
                                                  std::byte* data, std::size_t bytes) {
  StagingMemory& staging = connection_.staging();
  v1::SessionRequest request;
  if (chunk.write) {
    const std::size_t size = std::min(bytes, staging.size());
    std::memcpy(staging.data(), data, size);
    v1::ChunkWritten& written = *request.mutable_chunk_written();
    written.set_sequence(sequence);
    written.set_chunk(chunk.number);
    written.set_bytes(size);
    connection_.stream().Send(std::move(request));
    return size;
  }
  if (chunk.bytes == 0 || chunk.bytes > staging.size() || chunk.bytes > bytes) {
    return Broken("sent an impossible chunk of a broadcast");
  }
  std::memcpy(data, staging.data(), chunk.bytes);
  request.mutable_chunk_read()->set_sequence(sequence);
  request.mutable_chunk_read()->set_chunk(chunk.number);
  connection_.stream().Send(std::move(request));
  return chunk.bytes;
}

absl::Status JobChannel::AllReduce(std::byte* data, std::size_t count, DataType dtype, ReduceOp op,
                                   absl::Duration timeout) {
  const std::size_t item = ItemSize(dtype);
  if (item == 0) return Refused("all-reduce of a dtype that gradsync does not reduce");
  if (*ReduceOpName(op) == '\0') {
    return Refused("all-reduce that is neither sum, average, min nor max");
  }
  if (const char* why = WhyRefused(op, dtype, ReducedMemory::kHost)) {
    return Refused(absl::StrCat("all-reduce of ", DataTypeName(dtype), ": ", why));
  }
  StagingMemory& staging = connection_.staging();
  if (count > staging.size() / item) {
    return Refused(absl::StrCat("all-reduce of ", count, " ", DataTypeName(dtype),
                                " does not fit the staging memory of ", staging.size(),
                                " bytes; use a layout for large tensors"));
  }
  if (data == nullptr && count > 0) return Refused("all-reduce of a null pointer");
  const absl::Time deadline = AnswerDeadline(timeout);
  if (auto status = TakeTurn(TimeoutEnd(deadline)); !status.ok()) return status;
  const Turn turn(this);
  if (auto status = AcquireStaging(deadline); !status.ok()) return status;
  const StagingTurn staging_turn(&staging);
  if (count > 0) std::memcpy(staging.data(), data, count * item);
  const auto sequence = Begin(
      deadline,
      [count, dtype, op](std::uint64_t number, std::uint64_t left_ms, v1::SessionRequest* request) {
        v1::AllReduce& reduce = *request->mutable_all_reduce();
        reduce.set_sequence(number);
        reduce.set_dtype(static_cast<v1::DataType>(dtype));
        reduce.set_count(count);
        reduce.set_op(static_cast<v1::ReduceOp>(op));
        reduce.set_timeout_ms(left_ms);
      });
  if (!sequence.ok()) return sequence.status();
  if (auto status = AwaitDone(deadline); !status.ok()) return status;
  if (count > 0) std::memcpy(data, staging.data(), count * item);
  return absl::OkStatus();
}

absl::Status JobChannel::BeginCollective(absl::string_view description) {
  if (description.empty() || description.size() > kMaxCollectiveBytes) {
    return Refused(absl::StrCat("the description of a collective has ", description.size(),
                                " bytes; give 1 to ", kMaxCollectiveBytes));
  }
  if (auto end = connection_.End(); !end.ok()) return end;
  if (connection_.left()) return LeftError("it takes part in no collective");
  v1::SessionRequest request;
  request.mutable_begin_collective()->set_description(ValidUtf8(description));
  connection_.stream().Send(std::move(request));
  return absl::OkStatus();
}

absl::Status JobChannel::QueryCollectives(absl::Duration waited) {
  if (auto end = connection_.End(); !end.ok()) return end;
  v1::SessionRequest request;
  request.mutable_query_collectives()->set_waited_ms(
      static_cast<std::uint64_t>(std::max<std::int64_t>(0, absl::ToInt64Milliseconds(waited))));
  connection_.stream().Send(std::move(request));
  return absl::OkStatus();
}

absl::Status JobChannel::SendLeave(bool exit, absl::Time deadline) {
  if (auto status = TakeTurn(deadline); !status.ok()) return status;
  const Turn turn(this);
  if (!exit && connection_.left()) return absl::OkStatus();
  if (auto end = connection_.End(); !end.ok()) return end;
  if (!exit) {
    absl::MutexLock lock(&mutex_);
    last_to_leave_.reset();
  }
  v1::SessionRequest request;
  request.mutable_leave()->set_exit(exit);
  return Depart("Leave", std::move(request));
}

absl::Status JobChannel::SendFinish() {
  if (auto status = TakeTurn(absl::InfiniteFuture()); !status.ok()) return status;
  const Turn turn(this);
  if (auto end = connection_.End(); !end.ok()) return end;
  if (connection_.left()) return LeftError("it cannot finish");
  v1::SessionRequest request;
  request.mutable_finish();
  return Depart("Finish", std::move(request));
}

absl::Status JobChannel::Depart(absl::string_view call, v1::SessionRequest request) {
  if (auto status = connection_.BeginLeave(call); !status.ok()) return status;
  connection_.stream().Send(std::move(request));
  return absl::OkStatus();
}

absl::StatusOr<std::uint32_t> JobChannel::AwaitAllLeft(absl::Time deadline,
                                                       absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return last_to_leave_.has_value() || !end_.ok();
  };
  DaemonSilence silence(connection_);
  const Awaited awaited =
      AwaitUnlessSilent(&mutex_, absl::Condition(&answered), deadline, &silence);
  if (awaited == Awaited::kSilent) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonSilent,
                     absl::StrCat("rank ", connection_.options().rank, ": ", silence.Description(),
                                  "; LeaveAndStay can be repeated"),
                     connection_.Fields());
  }
  if (awaited == Awaited::kTimedOut) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
                     absl::StrCat("rank ", connection_.options().rank,
                                  " has left, but not every rank has within ",
                                  DurationText(timeout), "; call LeaveAndStay again"),
                     connection_.Fields());
  }
  if (!last_to_leave_.has_value()) return end_;
  connection_.EndLeave();
  return *last_to_leave_;
}

void JobChannel::OnChunkReady(const v1::ChunkReady& chunk) {
  absl::MutexLock lock(&mutex_);
  if (chunk.sequence() == sequence_) chunk_ = Chunk{chunk.chunk(), chunk.bytes(), chunk.write()};
}

void JobChannel::OnOperationDone(std::uint64_t sequence) {
  absl::MutexLock lock(&mutex_);
  if (sequence == sequence_) done_ = true;
}

void JobChannel::OnOperationFailed(std::uint64_t sequence, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (sequence == sequence_) failed_ = status;
}

void JobChannel::OnLeaveDone(const v1::LeaveDone& done) {
  absl::MutexLock lock(&mutex_);
  last_to_leave_ = done.last_to_leave();
  sequence_ = done.next_sequence() - 1;
}

void JobChannel::OnReplacement() {
  absl::MutexLock lock(&mutex_);
  healed_ = false;
}

void JobChannel::OnEndStep(std::uint32_t channel, std::uint64_t step) {
  absl::MutexLock lock(&mutex_);
  if (!healed_) ended_[channel] = step;
}

void JobChannel::OnStepDone(const v1::StepDone& done) {
  absl::MutexLock lock(&mutex_);
  const auto ended = ended_.find(done.channel());
  if (ended == ended_.end() || ended->second > done.step()) return;
  // One of several layouts may have had a complete step before.
  stepped_ = stepped_ || done.verdict() == v1::VERDICT_COMPLETE;
  ended_.erase(ended);
}

void JobChannel::OnHealed(std::uint64_t next_sequence) {
  absl::MutexLock lock(&mutex_);
  healed_ = true;
  ended_.clear();
  sequence_ = next_sequence - 1;
}

void JobChannel::OnSessionEnd(const absl::Status& end) {
  absl::MutexLock lock(&mutex_);
  end_ = end;
}

}  // namespace gradsync::client
