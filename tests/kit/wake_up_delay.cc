#include "tests/kit/wake_up_delay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

constexpr std::uint64_t kSleepNs = 2'000'000;
// Shorter delays are normal and are not kept.
constexpr std::uint64_t kNormalDelayNs = 100'000;
constexpr std::uint64_t kThreadsPassed = 10;

// Sleeps over and over while the program's tests run, and keeps the time and delay of each wake-up.
// Thread-safe.
class WakeUpDelays final : public testing::Environment {
 public:
  void SetUp() override {
    due_ns_ = NowNs() + kSleepNs;
    thread_ = std::thread([this] { Run(); });
  }
  void TearDown() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    stop_.notify_all();
    thread_.join();
  }

  std::uint64_t LongestSince(std::uint64_t since_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The thread may be late at this moment.
    const std::uint64_t now_ns = NowNs();
    std::uint64_t longest_ns = now_ns > due_ns_ ? now_ns - due_ns_ : 0;
    for (auto delay = delays_.rbegin(); delay != delays_.rend(); ++delay) {
      if (delay->end_ns < since_ns) break;
      longest_ns = std::max(longest_ns, delay->ns);
    }
    return longest_ns;
  }

 private:
  struct Delay {
    std::uint64_t end_ns;
    std::uint64_t ns;
  };

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      due_ns_ = NowNs() + kSleepNs;
      stop_.wait_for(lock, std::chrono::nanoseconds(kSleepNs));
      const std::uint64_t now_ns = NowNs();
      if (now_ns > due_ns_ + kNormalDelayNs) delays_.push_back({now_ns, now_ns - due_ns_});
    }
  }

  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopped_ = false;
  std::uint64_t due_ns_ = 0;   // when the thread wakes up next
  std::vector<Delay> delays_;  // in the order of time
  std::thread thread_;
};

// How many threads of the machine want each of its cores, at least 1: now, or on average of the
// last minute, whichever is more.
std::uint64_t ThreadsPerCore() {
  double last_minute = 0;
  double ignored = 0;
  std::uint64_t now = 0;
  std::ifstream("/proc/loadavg") >> last_minute >> ignored >> ignored >> now;
  const double threads = std::max(last_minute, static_cast<double>(now));
  const double cores = std::max(1u, std::thread::hardware_concurrency());
  return std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::ceil(threads / cores)));
}

// Googletest owns it, and calls SetUp() before the first test.
WakeUpDelays* const delays = [] {
  auto* const environment = new WakeUpDelays;
  testing::AddGlobalTestEnvironment(environment);
  return environment;
}();

}  // namespace

std::uint64_t FairBoundNs(std::uint64_t bound_ns, std::uint64_t since_ns) {
  return ThreadsPerCore() * (bound_ns + kThreadsPassed * delays->LongestSince(since_ns));
}

}  // namespace gradsync
