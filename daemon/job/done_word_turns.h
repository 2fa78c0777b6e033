// How many done words of a void step one thread writes in a row. Each one is a system call.

#ifndef DAEMON_JOB_DONE_WORD_TURNS_H_
#define DAEMON_JOB_DONE_WORD_TURNS_H_

#include <cstddef>

namespace gradsync::daemon {

// Up to this many done words are written at once, in 30 microseconds or less: others wait for the
// thread that makes a step void, a reduce thread, a gRPC thread, a thread of other nodes' messages
// or the one that looks at deadlines.
inline constexpr std::size_t kSignalledAtOnce = 32;
// Done words that one turn of the executor writes: a millisecond at most unless many threads wait.
inline constexpr std::size_t kSignalsPerTurn = 1024;

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_DONE_WORD_TURNS_H_
