// The job's own channel: Broadcast, Barrier and small all-reduce, one at a time, the same on every
// rank.
//
// Each rank numbers its operations from 1. The first rank that reaches a number chooses the
// operation. If another rank asks for a different one, the operation fails on every rank, and the
// error names both. A rank that comes late to an operation that failed gets the same failure.
//
// A barrier goes on without a lost rank. So does a broadcast whose named root is another rank. The
// rank's next session takes part again after operation N. N is the later of two: the last operation
// that the others call before the EndStep of that session's first complete step, and the last one
// that the lost session called. If operation N + 1 has ended by then, the rank's call of it is
// answered at once: a barrier succeeds. A broadcast is a breach, because its data is gone.
//
// Externally synchronized: guarded by the job's lock. Owned by the job. Holds the ranks' staging
// memory while their operation runs.

#ifndef DAEMON_JOB_OPERATION_CHANNEL_H_
#define DAEMON_JOB_OPERATION_CHANNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/late_ranks.h"
#include "daemon/job/membership.h"
#include "daemon/job/rank_search.h"
#include "daemon/job/staging_memory.h"
#include "daemon/reduce/reducer.h"
#include "proto/gradsync/data_type.h"
#include "proto/gradsync/reduce_op.h"

namespace gradsync::daemon {

enum class OperationKind : std::uint8_t { kBarrier, kBroadcast, kAllReduce };

// An operation's arguments. Every rank must agree on them.
struct OperationSpec {
  OperationKind kind = OperationKind::kBarrier;
  // Broadcast. kRootIsLowestLive: the root is chosen when every live rank has joined.
  std::uint32_t root = 0;
  std::uint64_t bytes = 0;                  // broadcast
  DataType dtype = DataType::kUnspecified;  // all-reduce
  std::uint64_t count = 0;                  // all-reduce
  ReduceOp op = ReduceOp::kSum;             // all-reduce

  bool operator==(const OperationSpec& other) const;
  // "broadcast of 4096 bytes from rank 0"
  std::string Describe() const;
};

class OperationChannel {
 public:
  // `reduced` and `copied` are called without the job's lock. The job takes the lock, stops if
  // there was a failure, and calls Reduced() or Copied().
  using OnMoved = std::function<void(const absl::Status& failure)>;
  OperationChannel(const JobTerms& terms, Membership* members, OnMoved reduced, OnMoved copied);

  // A Status that is not OK is a breach of the protocol by this rank and ends its session.
  absl::Status Join(std::uint32_t rank, std::uint64_t sequence, const OperationSpec& spec,
                    StagingMemory staging, std::uint64_t deadline_ns, DeferredActions* actions);
  absl::Status ChunkWritten(std::uint32_t rank, std::uint64_t sequence, std::uint64_t chunk,
                            std::uint64_t bytes, DeferredActions* actions);
  absl::Status ChunkRead(std::uint32_t rank, std::uint64_t sequence, std::uint64_t chunk,
                         DeferredActions* actions);
  void Reduced(DeferredActions* actions);
  void Copied(DeferredActions* actions);

  // True while an operation is in progress, even if every rank that waited in it has been lost.
  bool in_progress() const { return state_ != State::kIdle; }
  // True while this rank's session waits in an operation. A lost session that was in one does not
  // count.
  bool InOperation(std::uint32_t rank) const;
  // The number of the last operation that this rank has called. Not for a rank that is recovering.
  std::uint64_t LastOf(std::uint32_t rank) const { return ranks_[rank].sequence; }
  // True if the rank must not heal now: the operation in progress goes on without the rank, and the
  // rank cannot join it. The rank cannot join an operation that comes before its first one, or that
  // all others have joined. `last`: as for RankHealed().
  bool GoesOnWithout(std::uint32_t rank, std::uint64_t last) const {
    const bool takes_it_in = state_ == State::kJoining && LastBefore(rank, last) < sequence_;
    return ranks_[rank].excused && !takes_it_in;
  }
  void RankLeft(DeferredActions* actions);
  // True if the operation can go on without this rank: a barrier, or a broadcast whose named root
  // is another rank. An all-reduce without a rank, or with half of its data, would be wrong.
  bool DoesWithout(std::uint32_t rank, const OperationSpec& spec) const;
  // Why the loss of this rank's session ends the job: "operation 3 (broadcast of 4096 bytes from
  // rank 0) needed it". Empty if no operation is in progress, if the operation can do without the
  // rank, or if it is an all-reduce that has every rank's data already.
  std::string NeedOf(std::uint32_t rank) const;
  // The rank's session is lost, and NeedOf() is empty. The operation in progress and the next ones
  // go on without the rank, until another session of the rank has healed.
  void RankLost(std::uint32_t rank, DeferredActions* actions);
  // The rank came back after a loss and takes part again, in each operation after `last`. Returns
  // the number of its first one. Not called while GoesOnWithout() is true.
  std::uint64_t RankHealed(std::uint32_t rank, std::uint64_t last);
  // The rank had left and takes part again; no operation is running.
  void RankResumed(std::uint32_t rank);
  // The number of the next operation that begins.
  std::uint64_t next_sequence() const { return sequence_ + 1; }
  // Call it when the job has ended. Nothing begins any more, and no rank is answered. A reduction
  // or copy under way still finishes.
  void Stop();
  void ReleaseMemory();
  // Fails the operation if its deadline has passed. Tells the ranks that wait which ranks are late.
  void Tick(std::uint64_t now_ns, DeferredActions* actions);

  // True while a reduction or copy touches staging memory.
  bool busy() const { return state_ == State::kMoving || state_ == State::kCutMoving; }
  // The ranks for which the operation in progress waits. After Stop(): those for which it waited.
  std::vector<std::uint32_t> MissingRanks() const;
  std::uint64_t completed() const { return completed_; }
  std::uint64_t failed() const { return failed_count_; }

 private:
  // A barrier ends as soon as every rank has joined. An all-reduce moves once, a broadcast once for
  // each chunk:
  //
  //   kIdle --Join--> kJoining --> kMoving --Reduced--> kIdle
  //                   kJoining --> ( kWriting --ChunkWritten--> kMoving --Copied--> kReading )+
  //
  // Fail leads back to kIdle from everywhere, but from kMoving only once the move has ended.
  // Stop leads to kCut from everywhere, but by way of kCutMoving from kMoving:
  //
  //   kMoving --Stop--> kCutMoving --Reduced or Copied--> kCut
  enum class State : std::uint8_t {
    kIdle,       // no operation is in progress
    kJoining,    // some rank has not joined it
    kWriting,    // of a broadcast: the root writes a chunk into its staging memory
    kMoving,     // a reduction or copy touches staging memory
    kReading,    // of a broadcast: the receivers read the chunk
    kCutMoving,  // the job has ended, and a reduction or copy still touches staging memory
    kCut,        // the job has ended
  };
  struct RankOperation {
    std::uint64_t sequence = 0;  // last joined
    bool waiting = false;        // joined, not answered
    bool owes_chunk = false;     // a broadcast waits until it writes or reads the current chunk
    bool excused = false;        // the operation in progress goes on without the rank
    StagingMemory staging;
  };

  // The error of a failed operation, for each rank.
  using FailureOf = std::function<absl::Status(std::uint32_t rank)>;
  // An operation that has ended, for the ranks that come late to it.
  struct Ended {
    OperationSpec spec;
    std::uint32_t first_rank = 0;  // the one that began it
    FailureOf failure;             // null: complete, although a lost rank took no part
  };

  absl::Status Breach(std::uint32_t rank, std::uint64_t sequence, absl::string_view what) const;
  // The operation before the first one of a rank that heals: `last`, or a later one that its lost
  // session has called.
  std::uint64_t LastBefore(std::uint32_t rank, std::uint64_t last) const {
    return std::max(ranks_[rank].sequence, last);
  }
  // The error if `rank` calls something else than `first_rank`, which began the operation.
  absl::Status Mismatch(std::uint64_t sequence, std::uint32_t first_rank,
                        const OperationSpec& theirs, std::uint32_t rank,
                        const OperationSpec& mine) const;
  // Answers a rank that calls an operation which has ended.
  absl::Status AnswerLate(std::uint32_t rank, std::uint64_t sequence,
                          const OperationSpec& spec) const;
  // Keeps the end of the operation in progress for ranks that come late to it.
  void Remember(FailureOf failure);
  // The operation in progress waits for this rank to join it.
  bool Needs(std::uint32_t rank) const {
    return members_->IsAwaited(rank) && !ranks_[rank].excused;
  }
  // The operation of this number is in progress, and has not failed.
  bool Runs(std::uint64_t sequence) const;
  // Asks the root for the current chunk.
  void AwaitChunk(DeferredActions* actions);
  // Ends kMoving. True unless the job has ended meanwhile.
  bool Moved(State next);
  // Sets the ranks of `operation` to those that wait, and returns their buffers.
  HostBuffers Bind(ReduceOperation* operation) const;
  void MaybeRun(DeferredActions* actions);
  void MaybeNextChunk(DeferredActions* actions);
  void Complete(DeferredActions* actions);
  void Fail(const absl::Status& status, DeferredActions* actions) {
    Fail([status](std::uint32_t) { return status; }, actions);
  }
  void Fail(FailureOf failure, DeferredActions* actions);
  void TellLate(std::uint64_t now_ns, DeferredActions* actions);
  void Close();

  const JobTerms& terms_;
  Membership* const members_;
  const OnMoved copied_;
  std::vector<RankOperation> ranks_;

  State state_ = State::kIdle;
  // Not OK: the operation failed in kMoving. Its ranks get the error when the move has ended.
  absl::Status failing_;
  // The operation in progress; sequence_ is the last one begun.
  std::uint64_t sequence_ = 0;
  std::uint32_t first_rank_ = 0;
  OperationSpec spec_;
  std::uint32_t root_ = 0;  // of a broadcast, once it runs
  std::uint64_t deadline_ns_ = 0;
  std::uint64_t chunk_ = 0;        // next chunk the root may write
  std::uint64_t chunk_bytes_ = 0;  // of the chunk on its way
  std::uint64_t moved_ = 0;
  ReduceOperation reduction_;
  ReduceOperation broadcast_;  // of a chunk, if ranks are on other nodes

  // By sequence: the latest operations that have ended and that some rank has not reached. Each has
  // failed, or is complete without a lost rank.
  std::map<std::uint64_t, Ended> ended_;
  std::uint64_t completed_ = 0;
  std::uint64_t failed_count_ = 0;
  LateNotice late_notice_;
  RankSearch late_;  // for a rank that has not joined the operation, or not read the chunk
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_OPERATION_CHANNEL_H_
