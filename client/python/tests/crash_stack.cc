// Prints the C++ stack of a thread that crashes, and its name. Python's faulthandler prints
// Python's frames only; if the thread has none, it shows another thread as the one that crashed.
//
// A library for tests in Python; conftest.py loads it.

#include <execinfo.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstring>

namespace {

constexpr int kFrames = 64;
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};

int output;
struct sigaction before[NSIG];

void Write(const char* text) {
  // A test that crashes has no use for the error.
  [[maybe_unused]] const ssize_t written = write(output, text, std::strlen(text));
}

void PrintStack(int signal) {
  char thread[16] = "";
  prctl(PR_GET_NAME, thread);
  Write("thread '");
  Write(thread);
  Write("' crashes:\n");
  void* frames[kFrames];
  backtrace_symbols_fd(frames, backtrace(frames, kFrames), output);
  // The signal's former action follows when this returns.
  sigaction(signal, &before[signal], nullptr);
  raise(signal);
}

}  // namespace

// From now on crashes are printed to `descriptor`.
extern "C" void PrintCrashes(int descriptor) {
  output = descriptor;
  void* frame;
  backtrace(&frame, 1);  // The first call allocates memory.
  struct sigaction action {};
  action.sa_handler = PrintStack;
  action.sa_flags = SA_ONSTACK;
  for (const int signal : kSignals) sigaction(signal, &action, &before[signal]);
}
