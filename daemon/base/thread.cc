#include "daemon/base/thread.h"

#include <future>
#include <system_error>
#include <utility>
#include <vector>

#include "daemon/base/error.h"

namespace gradsync::daemon {

bool CanStartThreads(int count) {
  count += kThreadsLeftToGrpc;
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

absl::StatusOr<std::thread> StartThread(std::function<void()> body) {
  if (!CanStartThreads(1)) return OutOfThreads();
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
