// Starts threads without an exception.

#ifndef DAEMON_BASE_THREAD_H_
#define DAEMON_BASE_THREAD_H_

#include <functional>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradsync::daemon {

// How many threads are left to gRPC, which starts more threads when it has much to do. If the
// system refuses it one for a second, the work for that thread never runs, and any user's
// connection may hang.
inline constexpr int kThreadsLeftToGrpc = 8;

// The system may refuse this thread a thread while this object exists: the daemon can do without
// it. Without this object, a thread that the system refuses is tried again for a second.
class MayBeRefused {
 public:
  MayBeRefused();
  ~MayBeRefused();
  MayBeRefused(const MayBeRefused&) = delete;
  MayBeRefused& operator=(const MayBeRefused&) = delete;

 private:
  const bool before_;
};

// Starts a thread because a client or another node asks for something. Fails with OutOfThreads() if
// the daemon may have no more threads, or only the few that gRPC may need. Then the request fails,
// and the daemon goes on. Takes about 0.2 ms.
absl::StatusOr<std::thread> StartThread(std::function<void()> body);
// The same for several threads. It counts before it starts, so usually all start or none. If it
// fails later, `*threads` has those that have started.
absl::Status StartThreads(std::vector<std::function<void()>> bodies,
                          std::vector<std::thread>* threads);
// The same for a thread that CanStartThreads() has just counted.
absl::StatusOr<std::thread> StartCountedThread(std::function<void()> body);

// For a test process without gRPC, such as a fuzzer: from now on StartThread() does not check that
// kThreadsLeftToGrpc more threads could be started. An engine's process has no gRPC either, but its
// threads count with the daemon's.
void LeaveNoThreadsToGrpc();

// Calls `start`, which starts `count` threads, and returns true. False: the daemon may not start so
// many. While it runs, other threads wait in these functions.
bool StartWhatIsCounted(int count, absl::FunctionRef<void()> start);

// True if the daemon may start `count` threads now, besides the few that gRPC may need. To find
// out, starts all of them for about 0.2 ms. After a refusal the answer is false for 100 ms.
bool CanStartThreads(int count);

// RESOURCE_EXHAUSTED MEMORY: the daemon may have no more threads and processes.
absl::Status OutOfThreads();

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_THREAD_H_
