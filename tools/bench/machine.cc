#include "tools/bench/machine.h"

#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tools/bench/clocks.h"

namespace gradsync::bench {
namespace {

std::string ProcessorModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!absl::StartsWith(line, "model name")) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) break;
    return std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
  }
  return "unknown processor";
}

}  // namespace

std::uint32_t UsableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return static_cast<std::uint32_t>(std::max(CPU_COUNT(&cores), 1));
}

std::optional<double> CacheLineRoundTripNs() {
  if (UsableCores() < 2) return std::nullopt;
  // The best of several rounds: one in which neither thread was put aside.
  constexpr int kRounds = 20;
  constexpr int kTrips = 2000;
  // Gives up if the two do not run side by side after all.
  constexpr std::int64_t kLimitNs = 200'000'000;
  alignas(128) std::atomic<int> line{0};
  std::atomic<bool> stop{false};
  std::thread other([&line, &stop] {
    int expected = 1;
    while (!stop.load(std::memory_order_relaxed)) {
      if (line.load(std::memory_order_acquire) != expected) continue;
      line.store(expected + 1, std::memory_order_release);
      expected += 2;
    }
  });
  const std::int64_t limit_ns = MonotonicNs() + kLimitNs;
  std::optional<double> best_ns;
  int value = 0;
  for (int round = 0; round < kRounds && !stop; ++round) {
    const std::int64_t begin_ns = MonotonicNs();
    for (int trip = 0; trip < kTrips && !stop; ++trip) {
      line.store(value + 1, std::memory_order_release);
      value += 2;
      for (int spins = 0; line.load(std::memory_order_acquire) != value; ++spins) {
        if (spins % 1024 == 1023 && MonotonicNs() > limit_ns) {
          stop = true;
          break;
        }
      }
    }
    if (stop) break;
    const double trip_ns = static_cast<double>(MonotonicNs() - begin_ns) / kTrips;
    best_ns = std::min(best_ns.value_or(trip_ns), trip_ns);
  }
  stop = true;
  other.join();
  return best_ns;
}

std::string DescribeMachine() {
  utsname kernel = {};
  uname(&kernel);
  std::string text = absl::StrCat(
      ProcessorModel(), ", ", UsableCores(), " cores, ", kernel.sysname, " ", kernel.release, ", ",
      absl::FormatTime("%Y-%m-%d %H:%M UTC", absl::Now(), absl::UTCTimeZone()));
  if (const std::optional<double> trip_ns = CacheLineRoundTripNs(); trip_ns.has_value()) {
    absl::StrAppendFormat(&text, ", cache line %.0f ns there and back", *trip_ns);
  }
  return text;
}

}  // namespace gradsync::bench
