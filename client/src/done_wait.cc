#include "client/src/done_wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

#include "gradsync/shared_memory.h"

namespace gradsync::client {
namespace {

// The low 32 bits; the shared-memory ABI is little-endian.
const std::uint32_t* FutexOf(const std::atomic<std::uint64_t>& word) {
  return reinterpret_cast<const std::uint32_t*>(&word);
}

void Wake(const std::atomic<std::uint64_t>& word, int waiters) {
  syscall(SYS_futex, FutexOf(word), FUTEX_WAKE, waiters, nullptr, nullptr, 0);
}

}  // namespace

DoneWait WaitDone(const std::atomic<std::uint64_t>& word, std::uint64_t step,
                  absl::Duration timeout, DoneSleepers* sleepers) {
  using Clock = std::chrono::steady_clock;
  // A year at most, so that the arithmetic does not overflow.
  const auto span =
      absl::ToChronoNanoseconds(std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365)));
  const bool unbounded = timeout >= absl::Hours(24 * 365);
  const Clock::time_point deadline = Clock::now() + span;
  for (;;) {
    const std::uint64_t value = word.load(std::memory_order_acquire);
    if (SemaphoreReleased(value, step)) {
      return SemaphorePoisoned(value) ? DoneWait::kPoisoned : DoneWait::kReached;
    }
    timespec left{};
    if (!unbounded) {
      const auto ns =
          std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
      if (ns <= 0) return DoneWait::kTimedOut;
      left.tv_sec = static_cast<time_t>(ns / 1'000'000'000);
      left.tv_nsec = static_cast<long>(ns % 1'000'000'000);
    }
    // Not FUTEX_PRIVATE: the waker is another process. However this returns, the loop looks again.
    if (sleepers != nullptr) sleepers->fetch_add(1);
    syscall(SYS_futex, FutexOf(word), FUTEX_WAIT, static_cast<std::uint32_t>(value),
            unbounded ? nullptr : &left, nullptr, 0);
    if (sleepers == nullptr || sleepers->fetch_sub(1) <= kDoneWakes) continue;
    if (SemaphoreReleased(word.load(std::memory_order_acquire), step)) Wake(word, kDoneWakes);
  }
}

void PoisonDone(std::atomic<std::uint64_t>* word, std::uint64_t step) {
  word->store(kPoison + step, std::memory_order_release);
  Wake(*word, INT_MAX);
}

}  // namespace gradsync::client
