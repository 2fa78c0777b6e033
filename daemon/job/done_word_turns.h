// How many done words of a void step, or of ranks that take part again, one thread writes in a row.
// After each write it wakes the waiters, which is a system call.

#ifndef DAEMON_JOB_DONE_WORD_TURNS_H_
#define DAEMON_JOB_DONE_WORD_TURNS_H_

#include <cstddef>

namespace gradsync::daemon {

// The thread that makes a step void, or lets ranks take part again, writes up to this many done
// words itself, in 30 microseconds or less. If there are more, the executor writes them, because
// other work waits for that thread: it is a reduce thread, a gRPC thread, a thread that handles
// other nodes' messages, or the one that looks at deadlines. A test can set another limit in
// JobEnvironment, and so exceed it with few buckets.
inline constexpr std::size_t kSignalledAtOnce = 32;
// One turn of the executor writes at most this many done words. That takes a millisecond at most,
// unless many threads wait for these words.
inline constexpr std::size_t kSignalsPerTurn = 1024;

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_DONE_WORD_TURNS_H_
