// Bounds on time that are fair on a busy machine.

#ifndef TESTS_KIT_WAKE_UP_DELAY_H_
#define TESTS_KIT_WAKE_UP_DELAY_H_

#include <cstdint>

namespace gradsync {

// Returns (bound_ns + 10 * d) * n. d says how late a sleeping thread of this process has woken up
// since `since_ns`. n says how many threads wanted each core in that time, at least 1. On an idle
// machine that adds about 1 ms. On a busy one it adds what the kernel alone costs: a message passes
// through about ten threads, and each of them has to wake up, and then shares its core.
//
// `share`: the part of the measured times that keeps the bound: 1 for all of them, 0.5 for a
// median. With 1, d is the longest delay. Otherwise at most (1 - share) / 10 of the wake-ups are
// later than d: for a median, one in twenty. So ten wake-ups in a row are all within d with at
// least the probability `share`.
//
// n counts all threads of the machine, an attacker's too: those may have the priority of the
// daemon's, so the kernel gives them their share of the cores whatever the daemon does. n does not
// excuse a daemon that works for an attacker before it works for a step: meanwhile the step's
// threads sleep, and n does not count them.
//
// `since_ns` is on the clock of NowNs(). Thread-safe. Needs a running googletest program.
std::uint64_t FairBoundNs(std::uint64_t bound_ns, std::uint64_t since_ns, double share = 1.0);

}  // namespace gradsync

#endif  // TESTS_KIT_WAKE_UP_DELAY_H_
