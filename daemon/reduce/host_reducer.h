// The reducer of host memory: a few threads that combine buckets where the trainers wrote them.

#ifndef DAEMON_REDUCE_HOST_REDUCER_H_
#define DAEMON_REDUCE_HOST_REDUCER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/reduce/reducer.h"
#include "daemon/reduce/user_shares.h"

namespace gradsync::daemon {

// Thread-safe. Owns its threads. The submitters own the operations (see Reducer).
//
// A small operation runs on the submitter's thread before Reduce() returns, so it may overtake
// larger ones of its flow. ReduceAll() runs several operations this way as long as they together
// cost no more than one small one may.
//
// Every other operation is cut into slices. Within a flow, slices begin in the order of submission.
// Each user and each flow has a count of its reduced bytes. Every operation also adds to both
// counts what it costs to tell the ranks. A slice that takes longer than usual for its bytes counts
// for more bytes: sums of subnormal numbers take up to eight times as long. The next slice comes
// from the user with the lowest count, and among that user's flows from the one with the lowest
// count. The thread that finishes the last slice calls done(). So the done() of two operations of a
// flow may run at the same time, or in reverse order.
//
// Idle threads sleep. Reduce() allocates nothing once its queues have grown to the most operations
// ever outstanding.
class HostReducer final : public Reducer {
 public:
  // Operations that together read and write no more bytes than this run on the submitter's thread.
  // At 10 GB/s or more they take at most 26 microseconds, the time in which another thread wakes
  // up.
  static constexpr std::size_t kInlineTrafficBytes = 256 * 1024;
  // Bounds of a slice. With smaller slices, cutting costs more than it gains (64 KiB of one buffer:
  // 5 to 16 % slower). With larger ones, another user would wait too long for a turn: to read and
  // write 12 MiB takes about 0.6 ms. For two ranks a slice is still long enough for Combine() to
  // prefetch (2 MiB; without prefetching, 25 MiB take 3 % longer).
  static constexpr std::size_t kMinSliceBytes = std::size_t{1} << 20;     // of one buffer
  static constexpr std::size_t kMaxSliceTraffic = std::size_t{12} << 20;  // read and written
  // Exception: if there are many ranks, a slice still has this many bytes of one buffer.
  static constexpr std::size_t kLeastSliceBytes = std::size_t{128} << 10;
  // Slices begin at multiples of this in a bucket, so no two threads write to the same pair of
  // cache lines.
  static constexpr std::size_t kSliceAlignment = 128;

  // `threads` below 1 counts as 1. `clock` measures slices; null: MonotonicNowNs().
  explicit HostReducer(int threads, const Clock* clock = nullptr);
  // Finishes all submitted operations, done() included. Requires that no call of Reduce() is under
  // way; a done() may still call it.
  ~HostReducer() override;
  HostReducer(const HostReducer&) = delete;
  HostReducer& operator=(const HostReducer&) = delete;

  void Reduce(ReduceOperation* operation) override { ReduceAll({&operation, 1}); }
  void ReduceAll(absl::Span<ReduceOperation* const> operations) override;

  int threads() const { return static_cast<int>(threads_.size()); }

  // min(4, max(1, CPUs / 8)). CPUs are those that affinity and cgroup leave to this process. Most
  // CPUs stay free for the trainers, and four threads saturate the memory channels of a CPU socket.
  static int DefaultThreads();

 private:
  struct Queued {
    ReduceOperation* operation;
    std::uint32_t slices;
    std::uint32_t begun;  // slices handed out
  };
  using User = UserShares::User;
  // Operations of one flow that have slices left to begin. A ring that grows and never shrinks.
  struct Flow {
    std::uint64_t id = 0;
    User* user = nullptr;
    std::uint64_t user_number = 0;  // User::number
    std::uint64_t served = 0;
    std::size_t first = 0;
    std::size_t size = 0;
    std::vector<Queued> ring;

    void Push(const Queued& queued);
    Queued& Front() { return ring[first]; }
    void Pop();
  };
  struct Slice {
    ReduceOperation* operation;
    std::uint32_t slices;
    std::uint32_t index;
    // Whom it counts for.
    User* user;
    Flow* flow;
    std::uint64_t flow_id;
    std::uint64_t cost;  // in bytes
  };

  std::uint32_t SliceCount(const ReduceOperation& operation) const;
  static std::uint64_t CostOf(const Queued& queued);
  static void RunSlice(const Slice& slice);
  static void RunInline(ReduceOperation* operation);
  void Run();
  void PushLocked(const Queued& queued) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Requires active_ > 0.
  Slice NextSliceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The slice has taken `ns`.
  void RanLocked(const Slice& slice, std::uint64_t ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::uint64_t NowNs() const { return clock_ == nullptr ? MonotonicNowNs() : clock_->NowNs(); }

  const std::size_t thread_count_;
  const Clock* const clock_;

  Mutex mutex_;
  CondVar work_;  // a flow is active, or stopping_
  // The first active_ flows have work, the longest active one first. The others are empty; they
  // stay because their rings have storage. A linear search over the active ones finds a flow. The
  // active flows are few: one per job with a bucket in progress.
  std::vector<std::unique_ptr<Flow>> flows_ ABSL_GUARDED_BY(mutex_);
  std::size_t active_ ABSL_GUARDED_BY(mutex_) = 0;
  UserShares users_ ABSL_GUARDED_BY(mutex_);  // a user wants one turn for each active flow
  std::size_t sleeping_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread>
      threads_;  // constant after construction; last: they use the other members
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_HOST_REDUCER_H_
