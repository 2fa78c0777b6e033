#include "tools/bench/barrier.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace gradsync::bench {

void Barrier::Wait(std::uint32_t parties) {
  const std::uint32_t round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_acq_rel);
    syscall(SYS_futex, &round_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return;
  }
  while (round_.load(std::memory_order_acquire) == round) {
    syscall(SYS_futex, &round_, FUTEX_WAIT, round, nullptr, nullptr, 0);
  }
}

}  // namespace gradsync::bench
