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
  // A second measurement takes the same slices as the first one.
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

// Operations that are queued before other threads get the lock.
constexpr std::size_t kPushedAtOnce = 64;

// What done() costs for each rank that it tells, in bytes of traffic that take as long: about 5
// microseconds.
constexpr std::uint64_t kBytesPerRank = 64 << 10;

}  // namespace

std::uint64_t HostReducer::CostOf(const Queued& queued) {
  const ReduceOperation& operation = *queued.operation;
  const std::uint64_t traffic = TrafficBytes(operation) / queued.slices;
  return queued.begun + 1 < queued.slices
             ? traffic
             : traffic + kBytesPerRank * (1 + operation.host().buffers.size());
}

HostReducer::HostReducer(int threads, const Clock* clock)
    : thread_count_(static_cast<std::size_t>(std::max(1, threads))), clock_(clock) {
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

void HostReducer::RunInline(ReduceOperation* operation) {
  ReduceTimes times;
  times.start_ns = MonotonicNowNs();
  CombineBuffers(*operation, operation->host().buffers, operation->count,
                 operation->measure ? &operation->stats : nullptr);
  times.finish_ns = MonotonicNowNs();
  operation->done(times);
}

void HostReducer::ReduceAll(absl::Span<ReduceOperation* const> operations) {
  // How many run here, from the first one on.
  std::size_t here = 0;
  for (std::size_t traffic = 0; here < operations.size(); ++here) {
    traffic += TrafficBytes(*operations[here]);
    if (traffic > kInlineTrafficBytes) break;
  }
  const auto queued = operations.subspan(here);
  if (!queued.empty()) {
    std::size_t wake = 0, sleeping = 0;
    for (ReduceOperation* operation : queued) {
      const std::uint32_t slices = SliceCount(*operation);
      operation->host().slices_left.store(slices, std::memory_order_relaxed);
      if (operation->measure) operation->host().slice_stats.resize(slices);
      wake += slices;
    }
    for (std::size_t begin = 0; begin < queued.size(); begin += kPushedAtOnce) {
      MutexLock lock(&mutex_);
      for (ReduceOperation* operation : queued.subspan(begin, kPushedAtOnce)) {
        PushLocked({operation, operation->host().slices_left.load(std::memory_order_relaxed),
                    /*begun=*/0});
      }
      sleeping = sleeping_;
    }
    wake = std::min(wake, sleeping);
    // Notifies outside the lock, because the woken thread would immediately wait for the lock. If
    // another call has already woken one of the counted threads, that thread looks at the queues
    // anyway.
    for (; wake > 0; --wake) work_.NotifyOne();
  }
  for (ReduceOperation* operation : operations.subspan(0, here)) RunInline(operation);
}

int HostReducer::DefaultThreads() { return std::min(4, std::max(1, AvailableCpus() / 8)); }

std::uint32_t HostReducer::SliceCount(const ReduceOperation& operation) const {
  const std::size_t bytes = BufferBytes(operation);
  const std::size_t traffic = TrafficBytes(operation);
  if (traffic == 0) return 1;
  // The fewest that the upper bound allows.
  const std::size_t fewest = std::min(DivideUp(traffic, kMaxSliceTraffic),
                                      std::max<std::size_t>(1, bytes / kLeastSliceBytes));
  // Every thread gets as many as the others, unless they would become too small.
  const std::size_t rounds = DivideUp(fewest, thread_count_);
  const std::size_t even = thread_count_ * rounds;
  const std::size_t slices =
      rounds > 1 ? even : std::max(fewest, std::min(even, bytes / kMinSliceBytes));
  return static_cast<std::uint32_t>(slices);
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
  Slice slice{};
  std::uint64_t took_ns = 0;
  for (;;) {
    {
      MutexLock lock(&mutex_);
      if (slice.operation != nullptr) RanLocked(slice, took_ns);
      while (active_ == 0) {
        if (stopping_) return;
        ++sleeping_;
        work_.Wait(&mutex_);
        --sleeping_;
      }
      slice = NextSliceLocked();
    }
    const std::uint64_t start_ns = NowNs();
    RunSlice(slice);
    took_ns = NowNs() - start_ns;
  }
}

void HostReducer::RanLocked(const Slice& slice, std::uint64_t ns) {
  const std::uint64_t more = users_.End(slice.user, slice.cost, ns);
  // Another flow may have its place now.
  if (slice.flow->id == slice.flow_id) slice.flow->served += more;
}

void HostReducer::PushLocked(const Queued& queued) {
  const std::uint64_t id = queued.operation->flow;
  std::size_t i = 0;
  while (i < active_ && flows_[i]->id != id) ++i;
  if (i == active_) {
    // Work of its last active time counts, if it is still known.
    while (i < flows_.size() && flows_[i]->id != id) ++i;
    if (i == flows_.size()) {
      i = active_;
      if (i == flows_.size()) flows_.push_back(std::make_unique<Flow>());
      flows_[i]->id = id;
      flows_[i]->served = 0;
    }
    std::swap(flows_[active_], flows_[i]);
    i = active_++;
    Flow& flow = *flows_[i];
    User* const user = users_.Of(queued.operation->user);
    if (flow.user != user || flow.user_number != user->number) flow.served = 0;
    flow.user = user;
    flow.user_number = user->number;
    users_.Want(user);
    flow.served = std::max(flow.served, flow.user->flow_served);
  }
  flows_[i]->Push(queued);
}

HostReducer::Slice HostReducer::NextSliceLocked() {
  std::size_t next = 0;
  for (std::size_t i = 1; i < active_; ++i) {
    const Flow& flow = *flows_[i];
    const Flow& best = *flows_[next];
    if (flow.user->served < best.user->served ||
        (flow.user == best.user && flow.served < best.served)) {
      next = i;
    }
  }
  Flow& flow = *flows_[next];
  Queued& queued = flow.Front();
  const Slice slice{queued.operation, queued.slices, queued.begun, flow.user, &flow,
                    flow.id,          CostOf(queued)};
  if (slice.index == 0) {
    slice.operation->host().start_ns.store(MonotonicNowNs(), std::memory_order_relaxed);
  }
  flow.user->flow_served = flow.served;
  users_.Begin(flow.user, slice.cost);
  flow.served += slice.cost;
  ++queued.begun;
  if (queued.begun == queued.slices) flow.Pop();
  if (flow.size == 0) {
    users_.Unwant(flow.user);
    // The order of the others does not change.
    const auto first = flows_.begin() + static_cast<std::ptrdiff_t>(next);
    std::rotate(first, first + 1, flows_.begin() + static_cast<std::ptrdiff_t>(active_));
    --active_;
  }
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
