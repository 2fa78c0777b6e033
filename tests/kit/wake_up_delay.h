// Bounds on time that are fair on a busy machine.

#ifndef TESTS_KIT_WAKE_UP_DELAY_H_
#define TESTS_KIT_WAKE_UP_DELAY_H_

#include <cstdint>

namespace gradsync {

// Returns (bound_ns + 10 * d) * n. d is the longest delay since `since_ns` with which a sleeping
// thread of this process woke up. n is the number of threads that want each core. On an idle
// machine that adds about 1 ms. On a busy one it adds what the kernel alone costs: a message passes
// through about ten threads. Each has to wake up, and then shares its core.
// `since_ns` is on the clock of NowNs(). Thread-safe. Needs a running googletest program.
std::uint64_t FairBoundNs(std::uint64_t bound_ns, std::uint64_t since_ns);

}  // namespace gradsync

#endif  // TESTS_KIT_WAKE_UP_DELAY_H_
