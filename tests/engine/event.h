// An event that happens on any thread, and for which a test waits.

#ifndef TESTS_ENGINE_EVENT_H_
#define TESTS_ENGINE_EVENT_H_

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "absl/status/status.h"

namespace gradsync::daemon {

// The longest time that a test waits for an event before it fails.
inline constexpr std::chrono::seconds kPatience(60);

class Event {
 public:
  void Set(const absl::Status& status = absl::OkStatus()) {
    // Notifies under the lock, since a waiting thread may destroy this as soon as it has the lock.
    const std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    set_.notify_all();
  }

  // Nullopt if the event has not happened within `patience`.
  std::optional<absl::Status> Wait(std::chrono::milliseconds patience = kPatience) {
    std::unique_lock<std::mutex> lock(mutex_);
    set_.wait_for(lock, patience, [&] { return status_.has_value(); });
    return status_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable set_;
  std::optional<absl::Status> status_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_EVENT_H_
