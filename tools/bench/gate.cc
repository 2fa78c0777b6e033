#include "tools/bench/gate.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "absl/time/clock.h"

namespace gradsync::bench {
namespace {

// Sleeps while `word` is `value`, for at most `timeout` if that is given. May return early.
// Returns the errno of the system call, or 0.
int FutexWait(const std::atomic<std::uint32_t>& word, std::uint32_t value,
              const timespec* timeout) {
  return syscall(SYS_futex, &word, FUTEX_WAIT, value, timeout, nullptr, 0) == 0 ? 0 : errno;
}

void FutexWakeAll(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void Signal::Post() {
  posted_.fetch_add(1, std::memory_order_acq_rel);
  FutexWakeAll(posted_);
}

std::uint32_t Signal::WaitPast(std::uint32_t seen) {
  std::uint32_t now = posted();
  while (now == seen) {
    FutexWait(posted_, seen, nullptr);
    now = posted();
  }
  return now;
}

void Arrivals::Arrive(std::uint32_t parties) {
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties) FutexWakeAll(arrived_);
}

bool Arrivals::Wait(std::uint32_t parties, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (;;) {
    const std::uint32_t arrived = arrived_.load(std::memory_order_acquire);
    if (arrived >= parties) return true;
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    const timespec limit = absl::ToTimespec(left);
    if (FutexWait(arrived_, arrived, &limit) == EINTR) return false;
  }
}

void Barrier::Wait(std::uint32_t parties) {
  const std::uint32_t round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_acq_rel);
    FutexWakeAll(round_);
    return;
  }
  while (round_.load(std::memory_order_acquire) == round) FutexWait(round_, round, nullptr);
}

}  // namespace gradsync::bench
