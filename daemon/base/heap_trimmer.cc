#include "daemon/base/heap_trimmer.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kShortestPauseNs = 5'000'000'000;
constexpr std::uint64_t kLongestPauseNs = 300'000'000'000;

}  // namespace

std::uint64_t AnonymousMemoryBytes() {
  const UniqueFd statm(open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  if (!statm.valid()) return 0;
  char text[128] = {};
  if (read(statm.get(), text, sizeof(text) - 1) <= 0) return 0;
  unsigned long long resident = 0, shared = 0;
  if (std::sscanf(text, "%*u %llu %llu", &resident, &shared) != 2 || shared > resident) return 0;
  return (resident - shared) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

void HeapTrimmer::Tick(std::uint64_t now_ns) {
  owed_ = true;
  if (now_ns < next_ns_ || trimming_.load()) return;
  next_ns_ = now_ns + kShortestPauseNs;
  const std::uint64_t bytes = AnonymousMemoryBytes();
  const std::uint64_t left = left_bytes_.load();
  if (bytes > left + left / 4) pause_ns_.store(0);
  if (bytes < kSmallBytes || now_ns < trimmed_ns_ + pause_ns_.load()) return;
  BeginTrim(now_ns);
}

bool HeapTrimmer::TickUnused(std::uint64_t now_ns) {
  // It may have begun before the last users freed their memory.
  if (trimming_.load()) return true;
  if (!std::exchange(owed_, false) || AnonymousMemoryBytes() < kSmallBytes) return false;
  BeginTrim(now_ns);
  return true;
}

void HeapTrimmer::BeginTrim(std::uint64_t now_ns) {
  trimmed_ns_ = now_ns;
  trimming_.store(true);
  executor_->Run([this] { Trim(); });
}

void HeapTrimmer::Trim() {
  const std::uint64_t before = AnonymousMemoryBytes();
  malloc_trim(/*pad=*/0);
  const std::uint64_t after = AnonymousMemoryBytes();
  const bool helped = after < before - before / 8;
  const std::uint64_t longer = std::max(kShortestPauseNs, 2 * pause_ns_.load());
  pause_ns_.store(helped ? 0 : std::min(kLongestPauseNs, longer));
  left_bytes_.store(after);
  trimming_.store(false);
}

}  // namespace gradsync::daemon
