// --busy: a thread that computes beside a trainer's rank, as a real trainer's backward pass does.

#ifndef TOOLS_BENCH_BUSY_THREAD_H_
#define TOOLS_BENCH_BUSY_THREAD_H_

#include <atomic>
#include <cstdint>
#include <thread>

#include "tools/bench/gate.h"

namespace gradsync::bench {

// Computes in registers between Start() and Stop(), sleeps otherwise. Used by one thread; joins in
// its destructor.
class BusyThread {
 public:
  BusyThread();
  ~BusyThread();
  BusyThread(const BusyThread&) = delete;
  BusyThread& operator=(const BusyThread&) = delete;

  void Start();
  void Stop();
  // CPU time that the thread has used.
  std::int64_t CpuNs();

 private:
  void Run();

  std::atomic<bool> computing_{false};
  std::atomic<bool> quit_{false};
  Signal changed_;
  std::thread thread_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_BUSY_THREAD_H_
