// Something that happens, on any thread, and that a test waits for.

#ifndef TESTS_ENGINE_EVENT_H_
#define TESTS_ENGINE_EVENT_H_

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "absl/status/status.h"

namespace gradsync {

// What has not come after this will not come; the test fails.
inline constexpr std::chrono::seconds kPatience(60);

class Event {
 public:
  void Set(const absl::Status& status = absl::OkStatus()) {
    // Notified under the lock: whoever waited may destroy this as soon as it can take it.
    const std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    set_.notify_all();
  }

  // Nothing if it has not happened within `patience`.
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

}  // namespace gradsync

#endif  // TESTS_ENGINE_EVENT_H_
