#include "tools/bench/busy_thread.h"

#include <pthread.h>

#include "tools/bench/clocks.h"

namespace gradsync::bench {

BusyThread::BusyThread() : thread_([this] { Run(); }) {}

BusyThread::~BusyThread() {
  quit_ = true;
  Stop();
  thread_.join();
}

void BusyThread::Start() {
  computing_ = true;
  changed_.Post();
}

void BusyThread::Stop() {
  computing_ = false;
  changed_.Post();
}

std::int64_t BusyThread::CpuNs() {
  clockid_t clock;
  return pthread_getcpuclockid(thread_.native_handle(), &clock) == 0 ? ClockNs(clock) : 0;
}

void BusyThread::Run() {
  volatile double sink = 1.0;
  std::uint32_t seen = 0;
  while (!quit_) {
    while (computing_.load(std::memory_order_relaxed)) {
      double value = sink;
      for (int i = 0; i < 1000; ++i) value = value * 1.0000001 + 1e-9;
      sink = value > 2.0 ? 1.0 : value;
    }
    const std::uint32_t now = changed_.posted();
    if (now == seen) {
      changed_.WaitPast(seen);
      continue;
    }
    seen = now;
  }
}

}  // namespace gradsync::bench
