// Starts threads without an exception.

#ifndef DAEMON_BASE_THREAD_H_
#define DAEMON_BASE_THREAD_H_

#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradsync::daemon {

// gRPC starts threads of its own when it has much to do. If the system refuses one, the work that
// was meant for it never runs, and the connection of any user may stand still. So these are left.
inline constexpr int kThreadsLeftToGrpc = 8;

// For each thread that is started because a client or another node asks for something: if the
// daemon may have no more threads, or only the few that gRPC may need, what was asked for fails
// with OutOfThreads(), and the daemon goes on. Takes some 0.2 ms.
absl::StatusOr<std::thread> StartThread(std::function<void()> body);

// For a test process without gRPC, such as a fuzzer: from now on StartThread() does not try whether
// eight more threads could be started.
void LeaveNoThreadsToGrpc();

// True if the daemon may start so many threads now, besides the few that gRPC may need. To know it,
// it starts all of these for some 0.2 ms. After a refusal the answer is no for 100 ms.
bool CanStartThreads(int count);

// RESOURCE_EXHAUSTED MEMORY: the daemon may have no more threads and processes.
absl::Status OutOfThreads();

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_THREAD_H_
