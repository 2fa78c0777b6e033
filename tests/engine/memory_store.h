// A store for engines in one process.

#ifndef TESTS_ENGINE_MEMORY_STORE_H_
#define TESTS_ENGINE_MEMORY_STORE_H_

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/engine/rendezvous_store.h"

namespace gradsync::daemon {

// Thread-safe: shared by all nodes.
class MemoryStore final : public RendezvousStore {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!values_.emplace(key, value).second) {
        return absl::AlreadyExistsError(absl::StrCat("set twice: ", key));
      }
    }
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                           [&] { return values_.count(key) != 0; })) {
      return absl::DeadlineExceededError(absl::StrCat("nobody has set ", key));
    }
    return values_.at(key);
  }

  absl::Status Cancelled() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return cancelled_;
  }
  void Cancel(const absl::Status& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = why;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  absl::Status cancelled_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_MEMORY_STORE_H_
