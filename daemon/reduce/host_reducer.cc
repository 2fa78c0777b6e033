#include "daemon/reduce/host_reducer.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "daemon/base/clock.h"
#include "daemon/reduce/available_cpus.h"
#include "daemon/reduce/bucket_numbers.h"
#include "daemon/reduce/combine.h"

namespace gradsync {
namespace {

std::size_t BufferBytes(const ReduceOperation& operation) {
  return operation.count * ItemSize(operation.dtype);
}

// One buffer that is not scaled stays as it is (see Combine); measuring reads it.
std::size_t TrafficBytes(const ReduceOperation& operation) {
  if (operation.buffers.size() == 1 && operation.scale == 1.0) {
    return operation.measure ? BufferBytes(operation) : 0;
  }
  return 2 * operation.buffers.size() * BufferBytes(operation);
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
  if (TrafficBytes(*operation) <= kInlineTrafficBytes) {
    ReduceTimes times;
    times.start_ns = MonotonicNowNs();
    Combine(operation->dtype, operation->buffers, operation->count, operation->scale,
            operation->measure ? &operation->numbers : nullptr);
    times.finish_ns = MonotonicNowNs();
    operation->done(times);
    return;
  }
  const std::uint32_t slices = SliceCount(*operation);
  operation->slices_left.store(slices, std::memory_order_relaxed);
  if (operation->measure) operation->slice_numbers.resize(slices);
  std::size_t wake = 0;
  {
    MutexLock lock(&mutex_);
    PushLocked({operation, slices, /*begun=*/0});
    wake = std::min<std::size_t>(slices, sleeping_);
  }
  // Outside the lock, or the woken thread would at once wait for it. A thread that was counted and
  // has been woken by somebody else meanwhile looks at the queues anyway.
  for (; wake > 0; --wake) work_.NotifyOne();
}

int HostReducer::DefaultThreads() { return std::min(4, std::max(1, AvailableCpus() / 8)); }

std::uint32_t HostReducer::SliceCount(const ReduceOperation& operation) const {
  const std::size_t bytes = BufferBytes(operation);
  // One slice per thread, or as many per thread as the upper bound asks for: equal shares.
  const std::size_t rounds = DivideUp(bytes, thread_count_ * kMaxSliceBytes);
  const std::size_t slices = std::min(thread_count_ * rounds, bytes / kMinSliceBytes);
  return static_cast<std::uint32_t>(std::max<std::size_t>(1, slices));
}

void HostReducer::RunSlice(const Slice& slice) {
  ReduceOperation& operation = *slice.operation;
  const std::size_t bytes = BufferBytes(operation);
  // Shares are rounded up to the alignment, so the last slice is the short one, and empty at worst.
  const std::size_t share =
      DivideUp(DivideUp(bytes, slice.slices), kSliceAlignment) * kSliceAlignment;
  const std::size_t begin = std::min(bytes, slice.index * share);
  const std::size_t end = std::min(bytes, begin + share);
  absl::InlinedVector<std::byte*, 64> buffers(operation.buffers.begin(), operation.buffers.end());
  for (std::byte*& buffer : buffers) buffer += begin;
  Combine(operation.dtype, buffers, (end - begin) / ItemSize(operation.dtype), operation.scale,
          operation.measure ? &operation.slice_numbers[slice.index] : nullptr);

  // Release: this slice's writes; acquire, for the last: all slices' writes and start_ns. Unless
  // this was the last slice, the operation may be gone after this line.
  if (operation.slices_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (operation.measure) {
    operation.numbers = BucketNumbers{};
    for (const BucketNumbers& part : operation.slice_numbers) {
      operation.numbers.sum_of_squares += part.sum_of_squares;
      operation.numbers.non_finite += part.non_finite;
    }
  }
  operation.done({operation.start_ns.load(std::memory_order_relaxed), MonotonicNowNs()});
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
  // Just before the turn is the end of the round: a flow that comes and goes gets one slice a
  // round, as the others do.
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
    slice.operation->start_ns.store(MonotonicNowNs(), std::memory_order_relaxed);
  }
  ++queued.begun;
  if (queued.begun == queued.slices) flow.Pop();
  if (flow.size > 0) {
    turn_ = (turn_ + 1) % active_;
    return slice;
  }
  // The successor moves up into the flow's place and has the turn; the order of the others stays.
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

}  // namespace gradsync
