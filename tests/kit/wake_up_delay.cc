#include "tests/kit/wake_up_delay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <fstream>
#include <mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

constexpr std::uint64_t kSleepNs = 2'000'000;
// Shorter delays are normal and count as none.
constexpr std::uint64_t kNormalDelayNs = 100'000;
constexpr std::uint64_t kThreadsPassed = 10;
constexpr std::size_t kWakeUpsPerCount = 10;
// In less time the running threads are counted too seldom to say much.
constexpr std::uint64_t kLongEnoughNs = 1'000'000'000;

// How many threads of the machine want a core.
struct RunningThreads {
  double last_minute = 0;  // on average
  double now = 0;          // without the one that asks
};

RunningThreads CountRunningThreads() {
  RunningThreads threads;
  double ignored = 0;
  std::ifstream("/proc/loadavg") >> threads.last_minute >> ignored >> ignored >> threads.now;
  threads.now = std::max(0.0, threads.now - 1);
  return threads;
}

// Sleeps over and over while the program's tests run. Keeps the time and delay of each wake-up, and
// now and then how many threads want a core. Thread-safe.
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

  // A delay that this share of the wake-ups since then has not exceeded.
  std::uint64_t DelaySince(std::uint64_t since_ns, double share) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The thread may be late at this moment.
    const std::uint64_t now_ns = NowNs();
    std::vector<std::uint64_t> delays_ns = {now_ns > due_ns_ ? now_ns - due_ns_ : 0};
    for (auto wake = wake_ups_.rbegin(); wake != wake_ups_.rend(); ++wake) {
      if (wake->end_ns < since_ns) break;
      delays_ns.push_back(wake->delay_ns);
    }
    const auto last = static_cast<double>(delays_ns.size() - 1);
    const auto found = delays_ns.begin() + static_cast<std::ptrdiff_t>(std::ceil(last * share));
    std::nth_element(delays_ns.begin(), found, delays_ns.end());
    return *found < kNormalDelayNs ? 0 : *found;
  }

  // On average since then. In a short time it may be the average of the last minute, if that is
  // more.
  double ThreadsPerCoreSince(std::uint64_t since_ns) {
    const RunningThreads running = CountRunningThreads();
    double sum = running.now;
    double count = 1;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto one = counts_.rbegin(); one != counts_.rend(); ++one) {
        if (one->at_ns < since_ns) break;
        sum += one->threads;
        ++count;
      }
    }
    double threads = sum / count;
    if (NowNs() < since_ns + kLongEnoughNs) threads = std::max(threads, running.last_minute);
    return std::max(1.0, threads / std::max(1u, std::thread::hardware_concurrency()));
  }

 private:
  struct WakeUp {
    std::uint64_t end_ns;
    std::uint64_t delay_ns;
  };
  struct Count {
    std::uint64_t at_ns;
    double threads;
  };

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      due_ns_ = NowNs() + kSleepNs;
      stop_.wait_for(lock, std::chrono::nanoseconds(kSleepNs));
      const std::uint64_t now_ns = NowNs();
      wake_ups_.push_back({now_ns, now_ns > due_ns_ ? now_ns - due_ns_ : 0});
      if (wake_ups_.size() % kWakeUpsPerCount != 0) continue;
      lock.unlock();
      const double threads = CountRunningThreads().now;
      lock.lock();
      counts_.push_back({now_ns, threads});
    }
  }

  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopped_ = false;
  std::uint64_t due_ns_ = 0;      // when the thread wakes up next
  std::vector<WakeUp> wake_ups_;  // in the order of time
  std::vector<Count> counts_;     // in the order of time
  std::thread thread_;
};

// Googletest owns it, and calls SetUp() before the first test.
WakeUpDelays* const delays = [] {
  auto* const environment = new WakeUpDelays;
  testing::AddGlobalTestEnvironment(environment);
  return environment;
}();

}  // namespace

std::uint64_t FairBoundNs(std::uint64_t bound_ns, std::uint64_t since_ns, double share) {
  // At least this share of ten wake-ups in a row has no longer delay, even if they are not
  // independent: each of them may exceed it in a tenth of the other cases.
  const double each = 1 - (1 - share) / kThreadsPassed;
  const std::uint64_t waits_ns = kThreadsPassed * delays->DelaySince(since_ns, each);
  return static_cast<std::uint64_t>(delays->ThreadsPerCoreSince(since_ns) *
                                    static_cast<double>(bound_ns + waits_ns));
}

}  // namespace gradsync
