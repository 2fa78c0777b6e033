// The job's own channel, seen from one rank: Barrier, Broadcast, AllReduce and the wait of
// LeaveAndStay, one at a time.

#ifndef CLIENT_SRC_JOB_CHANNEL_H_
#define CLIENT_SRC_JOB_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"

namespace gradsync::v1 {
class ChunkReady;
class LeaveDone;
class SessionRequest;
class StepDone;
}  // namespace gradsync::v1

namespace gradsync::client {

class Connection;

// Thread-safe. A part of the Connection. Statuses: those of Session.
class JobChannel {
 public:
  explicit JobChannel(Connection* connection) : connection_(*connection) {}

  absl::Status Barrier(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Broadcast(std::byte* data, std::size_t bytes, std::uint32_t root,
                         absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AllReduce(std::byte* data, std::size_t count, DataType dtype, ReduceOp op,
                         absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status BeginCollective(absl::string_view description);
  absl::Status QueryCollectives(absl::Duration waited);
  // Both wait until no operation of this rank runs; SendLeave at most until `deadline`.
  // SendLeave(false) does nothing if this rank has already left and stays.
  absl::Status SendLeave(bool exit, absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status SendFinish() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until every rank has left; then this rank takes part again. Returns the rank that left
  // last. `timeout`: the call's, for the error.
  absl::StatusOr<std::uint32_t> AwaitAllLeft(absl::Time deadline, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Only in a replacement: the caller is about to send this EndStep. It holds the StepClient's
  // lock. The stream's thread takes that lock before OnStepDone, so OnStepDone of this step comes
  // later.
  void OnEndStep(std::uint32_t channel, std::uint64_t step) ABSL_LOCKS_EXCLUDED(mutex_);

  // The daemon's answers, on the stream's thread.
  void OnStepDone(const v1::StepDone& done) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnChunkReady(const v1::ChunkReady& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnOperationDone(std::uint64_t sequence) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnOperationFailed(std::uint64_t sequence, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnLeaveDone(const v1::LeaveDone& done) ABSL_LOCKS_EXCLUDED(mutex_);
  // The session takes the place of a lost one: no operation may begin until OnHealed.
  void OnReplacement() ABSL_LOCKS_EXCLUDED(mutex_);
  void OnHealed(std::uint64_t next_sequence) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnSessionEnd(const absl::Status& end) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Ends a turn, which has been taken, at the end of the scope.
  class Turn {
   public:
    explicit Turn(JobChannel* channel) : channel_(*channel) {}
    ~Turn() { channel_.EndTurn(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    JobChannel& channel_;
  };

  // Waits until no operation, Leave or Finish of this rank runs, and keeps others out until
  // EndTurn. WAIT_TIMEOUT: `deadline` has passed first.
  absl::Status TakeTurn(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  // LEFT: this rank waits in LeaveAndStay. `what`: what it cannot do.
  absl::Status LeftError(absl::string_view what) const;
  // Sends Leave or Finish. After that this rank sends nothing more or, if it stays, nothing until
  // every rank has left. `call`: the name of the trainer's call, for errors. The caller has the
  // turn.
  absl::Status Depart(absl::string_view call, v1::SessionRequest request)
      ABSL_LOCKS_EXCLUDED(mutex_);
  struct Chunk {
    std::uint64_t number;
    std::uint64_t bytes;
    bool write;
  };

  // True if OnHealed may come without another EndStep: one of the session's steps is complete, or
  // may still become so.
  bool MayHeal() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stepped_ || !ended_.empty(); }
  // Waits until a session that replaces a lost one takes part in operations.
  absl::Status AwaitHealed(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until an operation may begin, or returns why none may.
  absl::Status AwaitMayBegin(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the next operation its number and sends it. `timeout_ms`: what is left of the call's
  // time-out.
  absl::StatusOr<std::uint64_t> Begin(
      absl::Time deadline,
      const std::function<void(std::uint64_t sequence, std::uint64_t timeout_ms,
                               v1::SessionRequest*)>& fill) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the next chunk; nullopt: the operation is done.
  absl::StatusOr<std::optional<Chunk>> AwaitChunk(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AwaitDone(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // Sets given_up_ and returns it.
  absl::Status GiveUp(absl::StatusCode code, Reason reason, absl::string_view why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Moves the next chunk between `data` and the staging memory; returns its bytes.
  absl::StatusOr<std::size_t> MoveChunk(std::uint64_t sequence, const Chunk& chunk, std::byte* data,
                                        std::size_t bytes);
  absl::Status Broken(absl::string_view what) const;
  // Waits until an operation may begin and no transfer of the model's state uses the staging
  // memory. Then takes this memory. If the operation is refused, the memory stays as it is: the
  // daemon may still use it for FetchState, or for an operation that this rank gave up on. The
  // caller has the turn, and gives the memory back: see StagingTurn.
  absl::Status AcquireStaging(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Refused(absl::string_view what) const;

  Connection& connection_;

  absl::Mutex mutex_;
  // For a whole operation. A flag, because the wait for it has a deadline.
  bool turn_taken_ ABSL_GUARDED_BY(mutex_) = false;
  // The number of the operation that runs, or of the last one.
  std::uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  std::optional<Chunk> chunk_ ABSL_GUARDED_BY(mutex_);
  // Why this rank gave up on an operation. Other ranks may have completed it, so the sequence
  // numbers may differ, and no other operation may begin.
  absl::Status given_up_ ABSL_GUARDED_BY(mutex_);
  bool healed_ ABSL_GUARDED_BY(mutex_) = true;
  // Until healed_: one of the session's steps is complete; and, by channel, the steps that it has
  // ended and that are not decided.
  bool stepped_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::uint32_t, std::uint64_t> ended_ ABSL_GUARDED_BY(mutex_);
  std::optional<std::uint32_t> last_to_leave_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_JOB_CHANNEL_H_
