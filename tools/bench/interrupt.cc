#include "tools/bench/interrupt.h"

#include <signal.h>

namespace gradsync::bench {
namespace {

volatile sig_atomic_t interrupted = 0;

void Note(int signal) { interrupted = signal; }

}  // namespace

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = Note;  // without SA_RESTART
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGHUP, &action, nullptr);
}

int Interrupted() { return interrupted; }

}  // namespace gradsync::bench
