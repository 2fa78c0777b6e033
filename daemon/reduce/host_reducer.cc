#include "daemon/reduce/host_reducer.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "daemon/base/clock.h"
#include "daemon/reduce/available_cpus.h"
#include "daemon/reduce/combine.h"
#include "daemon/reduce/combine_order_free.h"
#include "daemon/reduce/gradient_stats.h"

namespace gradsync::daemon {
namespace {

std::size_t BufferBytes(const ReduceOperation& operation) {
  return operation.count * ItemSize(operation.dtype);
}

// A single buffer that is not scaled does not change (see Combine), but measuring reads it.
std::size_t TrafficBytes(const ReduceOperation& operation) {
  // What is measured again takes the slices that it had before.
  const std::size_t buffers =
      std::max(operation.host().buffers.size(), operation.host().measured_of);
  if (buffers == 1 && operation.scale == 1.0) {
    return operation.measure ? BufferBytes(operation) : 0;
  }
  return 2 * buffers * BufferBytes(operation);
}

void CombineBuffers(const ReduceOperation& operation, absl::Span<std::byte* const> buffers,
                    std::size_t count, GradientStats* stats) {
  if (IsOrderFree(operation.op, operation.dtype)) {
    CombineOrderFree(operation.op, operation.dtype, buffers, count);
  } else if (operation.host().measured_of > 1) {
    MeasureAgain(operation.dtype, buffers.front(), count, stats);
  } else {
    Combine(operation.dtype, buffers, count, operation.scale, stats);
  }
}

std::size_t DivideUp(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace

HostReducer::HostReducer(int threads)
    : thread_count_(static_cast<std::size_t>(std::max(1, threads))) {
  threads_.reserve(thread_count_);
  for (std::size_t i = 0; i < thread_count_; ++i) {
    threads_.emplace_back([this] { Run(); });
    pthread_setname_np(threads_.back().native_handle(), absl::StrCat("reduce-", i).c_str());
  }
}

HostReducer::~HostReducer() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void HostReducer::Reduce(ReduceOperation* operation) {
  HostReduction& work = operation->host();
  if (TrafficBytes(*operation) <= kInlineTrafficBytes) {
    ReduceTimes times;
    times.start_ns = MonotonicNowNs();
    CombineBuffers(*operation, work.buffers, operation->count,
                   operation->measure ? &operation->stats : nullptr);
    times.finish_ns = MonotonicNowNs();
    operation->done(times);
    return;
  }
  const std::uint32_t slices = SliceCount(*operation);
  work.slices_left.store(slices, std::memory_order_relaxed);
  if (operation->measure) work.slice_stats.resize(slices);
  std::size_t wake = 0;
  {
    MutexLock lock(&mutex_);
    PushLocked({operation, slices, /*begun=*/0});
    wake = std::min<std::size_t>(slices, sleeping_);
  }
  // Notifies outside the lock, because the woken thread would immediately wait for the lock. If
  // another call has already woken one of the counted threads, that thread looks at the queues
  // anyway.
  for (; wake > 0; --wake) work_.NotifyOne();
}

int HostReducer::DefaultThreads() { return std::min(4, std::max(1, AvailableCpus() / 8)); }

std::uint32_t HostReducer::SliceCount(const ReduceOperation& operation) const {
  const std::size_t bytes = BufferBytes(operation);
  // Every thread gets the same number of slices: one, or as many as the upper bound requires.
  const std::size_t rounds = DivideUp(bytes, thread_count_ * kMaxSliceBytes);
  const std::size_t slices = std::min(thread_count_ * rounds, bytes / kMinSliceBytes);
  return static_cast<std::uint32_t>(std::max<std::size_t>(1, slices));
}

void HostReducer::RunSlice(const Slice& slice) {
  ReduceOperation& operation = *slice.operation;
  HostReduction& work = operation.host();
  const std::size_t bytes = BufferBytes(operation);
  // Shares are rounded up to the alignment, so the last slice may be shorter, or empty.
  const std::size_t share =
      DivideUp(DivideUp(bytes, slice.slices), kSliceAlignment) * kSliceAlignment;
  const std::size_t begin = std::min(bytes, slice.index * share);
  const std::size_t end = std::min(bytes, begin + share);
  absl::InlinedVector<std::byte*, 64> buffers(work.buffers.begin(), work.buffers.end());
  for (std::byte*& buffer : buffers) buffer += begin;
  CombineBuffers(operation, buffers, (end - begin) / ItemSize(operation.dtype),
                 operation.measure ? &work.slice_stats[slice.index] : nullptr);

  // Releases this slice's writes. The last slice acquires the writes of all slices and start_ns.
  // After this line, only the last slice may use the operation: it may no longer exist for the
  // others.
  if (work.slices_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (operation.measure) {
    operation.stats = GradientStats{};
    for (const GradientStats& part : work.slice_stats) {
      operation.stats.sum_of_squares += part.sum_of_squares;
      operation.stats.non_finite += part.non_finite;
    }
  }
  operation.done({work.start_ns.load(std::memory_order_relaxed), MonotonicNowNs()});
}

void HostReducer::Run() {
  for (;;) {
    Slice slice;
    {
      MutexLock lock(&mutex_);
      while (active_ == 0) {
        if (stopping_) return;
        ++sleeping_;
        work_.Wait(&mutex_);
        --sleeping_;
      }
      slice = NextSliceLocked();
    }
    RunSlice(slice);
  }
}

void HostReducer::PushLocked(const Queued& queued) {
  const std::uint64_t id = queued.operation->flow;
  std::size_t i = 0;
  while (i < active_ && flows_[i]->id != id) ++i;
  if (i < active_) {
    flows_[i]->Push(queued);
    return;
  }
  if (active_ == flows_.size()) flows_.push_back(std::make_unique<Flow>());
  flows_[active_]->id = id;
  flows_[active_]->Push(queued);
  // The place just before the turn is the end of the round. So a flow that comes and goes gets one
  // slice a round, like the others.
  const auto turn = flows_.begin() + static_cast<std::ptrdiff_t>(turn_);
  const auto added = flows_.begin() + static_cast<std::ptrdiff_t>(active_);
  std::rotate(turn, added, added + 1);
  ++active_;
  turn_ = (turn_ + 1) % active_;
}

HostReducer::Slice HostReducer::NextSliceLocked() {
  Flow& flow = *flows_[turn_];
  Queued& queued = flow.Front();
  const Slice slice{queued.operation, queued.slices, queued.begun};
  if (slice.index == 0) {
    slice.operation->host().start_ns.store(MonotonicNowNs(), std::memory_order_relaxed);
  }
  ++queued.begun;
  if (queued.begun == queued.slices) flow.Pop();
  if (flow.size > 0) {
    turn_ = (turn_ + 1) % active_;
    return slice;
  }
  // The next flow moves up into this flow's place and has the turn. The order of the others does
  // not change.
  const auto turn = flows_.begin() + static_cast<std::ptrdiff_t>(turn_);
  std::rotate(turn, turn + 1, flows_.begin() + static_cast<std::ptrdiff_t>(active_));
  --active_;
  if (turn_ == active_) turn_ = 0;
  return slice;
}

void HostReducer::Flow::Push(const Queued& queued) {
  if (size == ring.size()) {
    std::rotate(ring.begin(), ring.begin() + static_cast<std::ptrdiff_t>(first), ring.end());
    first = 0;
    ring.resize(std::max<std::size_t>(16, 2 * size));
  }
  ring[(first + size) % ring.size()] = queued;
  ++size;
}

void HostReducer::Flow::Pop() {
  first = (first + 1) % ring.size();
  --size;
}

}  // namespace gradsync::daemon
