// The reducer of host memory: a few threads that combine buckets where the trainers wrote them.

#ifndef DAEMON_REDUCE_HOST_REDUCER_H_
#define DAEMON_REDUCE_HOST_REDUCER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/base/mutex.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

// Thread-safe. Owns its threads. The submitters own the operations (see Reducer).
//
// A small operation runs on the submitter's thread before Reduce() returns, so it may overtake
// larger ones of its flow. A larger one is cut into slices. Slices begin in the order of submission
// within a flow, and by turns between flows. The thread that finishes the last slice calls done().
// So the done() of two operations of a flow may run at the same time, or in reverse order.
//
// Idle threads sleep. Reduce() allocates nothing once its queues have grown to the most operations
// ever outstanding.
class HostReducer final : public Reducer {
 public:
  // An operation that reads and writes no more bytes than this runs on the submitter's thread. At
  // 10 GB/s and more it takes no longer than the 25 microseconds in which another thread wakes up.
  static constexpr std::size_t kInlineTrafficBytes = 256 * 1024;
  // Bounds of a slice, in bytes of one buffer. With smaller slices, cutting costs more than it wins
  // (64 KiB: 5 to 16 % slower). With larger ones, another flow would wait too long for its turn
  // (two ranks: 32 MiB of traffic, about 2 ms).
  static constexpr std::size_t kMinSliceBytes = std::size_t{1} << 20;
  static constexpr std::size_t kMaxSliceBytes = std::size_t{8} << 20;
  // Slices begin at multiples of this in a bucket, so no two threads write one pair of cache lines.
  static constexpr std::size_t kSliceAlignment = 128;

  // `threads` below 1 counts as 1.
  explicit HostReducer(int threads);
  // Finishes all submitted operations, done() included. Requires that no call of Reduce() is under
  // way; a done() may still call it.
  ~HostReducer() override;
  HostReducer(const HostReducer&) = delete;
  HostReducer& operator=(const HostReducer&) = delete;

  void Reduce(ReduceOperation* operation) override;

  int threads() const { return static_cast<int>(threads_.size()); }

  // min(4, max(1, CPUs / 8)). It counts the CPUs that affinity and cgroup leave to this process.
  // Most stay free for the trainers, and four threads fill a socket's memory channels.
  static int DefaultThreads();

 private:
  struct Queued {
    ReduceOperation* operation;
    std::uint32_t slices;
    std::uint32_t begun;  // slices handed out
  };
  // Operations of one flow that have slices left to begin. A ring that grows and never shrinks.
  struct Flow {
    std::uint64_t id = 0;
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
  };

  std::uint32_t SliceCount(const ReduceOperation& operation) const;
  static void RunSlice(const Slice& slice);
  void Run();
  void PushLocked(const Queued& queued) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Requires active_ > 0.
  Slice NextSliceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::size_t thread_count_;

  Mutex mutex_;
  CondVar work_;  // a flow is active, or stopping_
  // The first active_ flows have work. The others are empty; they stay because their rings have
  // storage. A linear search over the active ones finds a flow. They are few: one per job with a
  // bucket in progress.
  std::vector<std::unique_ptr<Flow>> flows_ ABSL_GUARDED_BY(mutex_);
  std::size_t active_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t turn_ ABSL_GUARDED_BY(mutex_) =
      0;  // the flow that is served next; below active_, or 0
  std::size_t sleeping_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread>
      threads_;  // constant after construction; last: they use the other members
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_HOST_REDUCER_H_
