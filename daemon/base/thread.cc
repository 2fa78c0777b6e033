#include "daemon/base/thread.h"

#include <atomic>
#include <cstdint>
#include <future>
#include <system_error>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {
namespace {

std::atomic<bool> has_grpc{true};

// After a refusal the answer is no for so long. The next attempt takes gRPC's threads again.
constexpr std::uint64_t kRefusedNs = 100'000'000;

// Starts so many threads and ends them. False: the system refuses one.
bool TryToStart(int count) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  threads.reserve(count);
  bool can = true;
  try {
    for (int i = 0; i < count; ++i) threads.emplace_back([ended] { ended.wait(); });
  } catch (const std::system_error&) {
    can = false;
  }
  end.set_value();
  for (std::thread& thread : threads) thread.join();
  return can;
}

}  // namespace

void LeaveNoThreadsToGrpc() { has_grpc.store(false); }

bool CanStartThreads(int count) {
  // Two attempts at once would take each other's threads.
  static Mutex mutex;
  static std::uint64_t refused_ns = 0;  // guarded by it; 0: never
  const MutexLock lock(&mutex);
  if (refused_ns != 0 && MonotonicNowNs() < refused_ns + kRefusedNs) return false;
  const bool can = TryToStart(count + (has_grpc.load() ? kThreadsLeftToGrpc : 0));
  refused_ns = can ? 0 : MonotonicNowNs();
  return can;
}

absl::StatusOr<std::thread> StartThread(std::function<void()> body) {
  if (has_grpc.load() && !CanStartThreads(1)) return OutOfThreads();
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error&) {
    return OutOfThreads();
  }
}

absl::Status OutOfThreads() {
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                   "no thread could be started: raise the daemon's limit of threads (TasksMax=), "
                   "or the limit of processes of its container or user");
}

}  // namespace gradsync::daemon
