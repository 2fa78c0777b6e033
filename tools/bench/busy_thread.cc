#include "tools/bench/busy_thread.h"

#include <pthread.h>

#include "tools/bench/clocks.h"

namespace gradsync::bench {

BusyThread::BusyThread() : thread_([this] { Run(); }) {}

BusyThread::~BusyThread() {
  Set(false, true);
  thread_.join();
}

void BusyThread::Set(bool computing, bool quit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  computing_ = computing;
  quit_ = quit;
  changed_.notify_one();
}

std::int64_t BusyThread::CpuNs() {
  clockid_t clock;
  return pthread_getcpuclockid(thread_.native_handle(), &clock) == 0 ? ClockNs(clock) : 0;
}

void BusyThread::Run() {
  volatile double sink = 1.0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return quit_ || computing_; });
      if (quit_) return;
    }
    while (computing_.load(std::memory_order_relaxed)) {
      double value = sink;
      for (int i = 0; i < 1000; ++i) value = value * 1.0000001 + 1e-9;
      sink = value > 2.0 ? 1.0 : value;
    }
  }
}

}  // namespace gradsync::bench
