// Starts threads without an exception.

#ifndef DAEMON_BASE_THREAD_H_
#define DAEMON_BASE_THREAD_H_

#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradsync::daemon {

// For each thread that is started because a client or another node asks for something: if the
// daemon may have no more threads, what was asked for fails, and the daemon goes on.
// OutOfThreads().
absl::StatusOr<std::thread> StartThread(std::function<void()> body);

// RESOURCE_EXHAUSTED MEMORY: the daemon may have no more threads and processes.
absl::Status OutOfThreads();

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_THREAD_H_
