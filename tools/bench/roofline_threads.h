// The roofline: threads that average the ranks' buffers in place and do nothing else. No all-reduce
// can be faster on the same memory.

#ifndef TOOLS_BENCH_ROOFLINE_THREADS_H_
#define TOOLS_BENCH_ROOFLINE_THREADS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "proto/gradsync/data_type.h"
#include "tools/bench/barrier.h"
#include "tools/bench/vector_loops.h"

namespace gradsync::bench {

// Threads that sleep between averages. Used by one thread. The destructor joins.
class RooflineThreads {
 public:
  struct Result {
    std::int64_t time_ns = 0;  // from the first thread's first element to the last thread's last
    std::int64_t cpu_ns = 0;   // of all threads, without waiting
  };

  explicit RooflineThreads(std::uint32_t threads);
  ~RooflineThreads();
  RooflineThreads(const RooflineThreads&) = delete;
  RooflineThreads& operator=(const RooflineThreads&) = delete;

  // Averages `count` elements of `buffers`, a contiguous share per thread. The clock starts when
  // all threads are awake: waking them is no part of the bound.
  Result Average(DataType dtype, Prefetch prefetch, const std::vector<std::byte*>& buffers,
                 std::size_t count);

 private:
  struct alignas(128) Share {
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::int64_t cpu_ns = 0;
  };
  struct Job {
    DataType dtype = DataType::kUnspecified;
    Prefetch prefetch = Prefetch::kHardware;
    const std::vector<std::byte*>* buffers = nullptr;
    std::size_t count = 0;
    bool quit = false;
  };

  void RunThread(std::uint32_t thread);
  void AwaitAll(std::uint32_t target);

  const std::uint32_t thread_count_;
  // Written before `start_`, read after it.
  Job job_;
  // The threads and the caller meet here.
  Barrier start_;
  Barrier finish_;
  // Counts awake threads over all jobs.
  std::atomic<std::uint32_t> awake_{0};
  // Each written by its thread before `finish_`.
  std::vector<Share> shares_;
  std::vector<std::thread> threads_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_ROOFLINE_THREADS_H_
