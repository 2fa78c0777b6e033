#include "daemon/base/thread.h"

#include <system_error>
#include <utility>

#include "daemon/base/error.h"

namespace gradsync::daemon {

absl::StatusOr<std::thread> StartThread(std::function<void()> body) {
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
