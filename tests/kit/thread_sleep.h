// Whether a thread of this process sleeps: for tests of calls that must wait.

#ifndef TESTS_KIT_THREAD_SLEEP_H_
#define TESTS_KIT_THREAD_SLEEP_H_

#include <sys/types.h>

#include <atomic>

namespace gradsync {

// The calling thread, for AwaitSleep.
pid_t ThisThread();

// Returns when the thread sleeps, or when `*returned` is true. `returned`: may be null.
void AwaitSleep(pid_t thread, const std::atomic<bool>* returned = nullptr);

}  // namespace gradsync

#endif  // TESTS_KIT_THREAD_SLEEP_H_
