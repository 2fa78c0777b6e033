#include "tests/fakes/machine/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace gradsync::fakes {

// Without FUTEX_PRIVATE, since processes share the page.
void FutexWait(const std::atomic<std::uint32_t>& word, std::uint32_t value, int timeout_ms) {
  const timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, timeout_ms < 0 ? nullptr : &timeout, nullptr, 0);
}

void FutexWakeAll(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace gradsync::fakes
