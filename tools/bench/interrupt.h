// Ctrl-C: the bench stops what it has started, then ends.

#ifndef TOOLS_BENCH_INTERRUPT_H_
#define TOOLS_BENCH_INTERRUPT_H_

namespace gradsync::bench {

// SIGINT, SIGTERM and SIGHUP no longer end the process; they set Interrupted(), which is looked at
// between two turns.
void CatchInterrupts();
// The signal, or 0.
int Interrupted();

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_INTERRUPT_H_
