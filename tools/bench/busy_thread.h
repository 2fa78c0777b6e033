// --busy: a thread that computes beside a trainer's rank, as a real trainer's backward pass does.

#ifndef TOOLS_BENCH_BUSY_THREAD_H_
#define TOOLS_BENCH_BUSY_THREAD_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace gradsync::bench {

// Computes in registers between Start() and Stop() and sleeps otherwise. Used by one thread. The
// destructor joins.
class BusyThread {
 public:
  BusyThread();
  ~BusyThread();
  BusyThread(const BusyThread&) = delete;
  BusyThread& operator=(const BusyThread&) = delete;

  void Start() { Set(true, false); }
  void Stop() { Set(false, false); }
  // CPU time that the thread has used.
  std::int64_t CpuNs();

 private:
  void Set(bool computing, bool quit);
  void Run();

  std::atomic<bool> computing_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool quit_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_BUSY_THREAD_H_
