#include "daemon/rpc/health_answers.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

HealthAnswers::Response HealthAnswers::StateOf(const std::string& service) const {
  Response response;
  if (!service.empty() && services_.count(service) == 0) {
    response.set_status(Response::SERVICE_UNKNOWN);
  } else {
    response.set_status(serving_ ? Response::SERVING : Response::NOT_SERVING);
  }
  return response;
}

absl::StatusOr<HealthAnswers::Response> HealthAnswers::Check(const Request& request) const {
  MutexLock lock(&mutex_);
  const Response response = StateOf(request.service());
  if (response.status() != Response::SERVICE_UNKNOWN) return response;
  return absl::NotFoundError("the daemon has no service of this name; reflection lists them");
}

void HealthAnswers::Watch(const std::shared_ptr<Stream>& stream, const Request& request) {
  Response state;
  {
    MutexLock lock(&mutex_);
    state = StateOf(request.service());
    watchers_.erase(std::remove_if(watchers_.begin(), watchers_.end(),
                                   [](const Watcher& one) { return one.stream.expired(); }),
                    watchers_.end());
    // An unknown service stays unknown.
    if (state.status() != Response::SERVICE_UNKNOWN) {
      watchers_.push_back({stream, request.service()});
    }
    stream->Queue(std::move(state));  // under the lock, so that states are queued in order
  }
  stream->Flush();
}

void HealthAnswers::StopServing() {
  std::vector<std::shared_ptr<Stream>> told;
  {
    MutexLock lock(&mutex_);
    serving_ = false;
    for (const Watcher& watcher : watchers_) {
      auto stream = watcher.stream.lock();
      if (stream == nullptr) continue;
      stream->Queue(StateOf(watcher.service));
      told.push_back(std::move(stream));
    }
    watchers_.clear();
  }
  for (const auto& stream : told) stream->Flush();
}

}  // namespace gradsync::daemon
