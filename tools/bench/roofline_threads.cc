#include "tools/bench/roofline_threads.h"

#include <algorithm>

#include "tools/bench/clocks.h"

namespace gradsync::bench {

RooflineThreads::RooflineThreads(std::uint32_t threads) : thread_count_(threads), shares_(threads) {
  for (std::uint32_t thread = 0; thread < threads; ++thread) {
    threads_.emplace_back([this, thread] { RunThread(thread); });
  }
}

RooflineThreads::~RooflineThreads() {
  job_.quit = true;
  start_.Wait(thread_count_ + 1);
  for (std::thread& thread : threads_) thread.join();
}

RooflineThreads::Result RooflineThreads::Average(DataType dtype, Prefetch prefetch,
                                                 const std::vector<std::byte*>& buffers,
                                                 std::size_t count) {
  job_ = Job{dtype, prefetch, &buffers, count, false};
  start_.Wait(thread_count_ + 1);
  finish_.Wait(thread_count_ + 1);
  Result result;
  std::int64_t begin_ns = shares_[0].begin_ns;
  std::int64_t end_ns = shares_[0].end_ns;
  for (const Share& share : shares_) {
    begin_ns = std::min(begin_ns, share.begin_ns);
    end_ns = std::max(end_ns, share.end_ns);
    result.cpu_ns += share.cpu_ns;
  }
  result.time_ns = end_ns - begin_ns;
  return result;
}

// Spins: the measurement would include a wake-up if it slept again. If the other threads do not get
// a core within a millisecond (busy trainers), it starts without them, as a real thread pool would.
void RooflineThreads::AwaitAll(std::uint32_t target) {
  constexpr std::int64_t kLimitNs = 1'000'000;
  const std::int64_t limit_ns = MonotonicNs() + kLimitNs;
  while (static_cast<std::int32_t>(awake_.load(std::memory_order_acquire) - target) < 0 &&
         MonotonicNs() < limit_ns) {
  }
}

void RooflineThreads::RunThread(std::uint32_t thread) {
  for (std::uint32_t round = 0;; ++round) {
    start_.Wait(thread_count_ + 1);
    if (job_.quit) return;
    const std::size_t lines = (job_.count + kLoopAlignment - 1) / kLoopAlignment;
    const std::size_t begin = lines * thread / thread_count_ * kLoopAlignment;
    const std::size_t end =
        std::min(job_.count, lines * (thread + 1) / thread_count_ * kLoopAlignment);
    awake_.fetch_add(1, std::memory_order_acq_rel);
    AwaitAll((round + 1) * thread_count_);
    Share& share = shares_[thread];
    const std::int64_t cpu_ns = ThreadCpuNs();
    share.begin_ns = MonotonicNs();
    AverageInPlace(job_.dtype, job_.prefetch, job_.buffers->data(),
                   static_cast<std::uint32_t>(job_.buffers->size()), begin, end);
    share.end_ns = MonotonicNs();
    share.cpu_ns = ThreadCpuNs() - cpu_ns;
    finish_.Wait(thread_count_ + 1);
  }
}

}  // namespace gradsync::bench
