#include "daemon/peer/rendezvous.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

Rendezvous::Rendezvous(std::function<void(const std::string&, const std::string&)> set,
                       std::function<void(const std::string&)> ask)
    : set_(std::move(set)), ask_(std::move(ask)) {}

absl::Status Rendezvous::Set(const std::string& key, const std::string& value) {
  if (set_ == nullptr) return Put(key, value);
  set_(key, value);
  return absl::OkStatus();
}

absl::StatusOr<std::string> Rendezvous::Get(const std::string& key, absl::Duration timeout) {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  bool ask = false;
  {
    MutexLock lock(&mutex_);
    if (!cancelled_.ok()) return cancelled_;
    ask = ask_ != nullptr && values_.count(key) == 0 && asked_.insert(key).second;
  }
  if (ask) ask_(key);
  MutexLock lock(&mutex_);
  for (;;) {
    if (!cancelled_.ok()) return cancelled_;
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    // Even with a deadline that has passed, WaitUntil() sleeps for a moment.
    const bool in_time = timeout > absl::ZeroDuration() && changed_.WaitUntil(&mutex_, deadline);
    if (!in_time && values_.count(key) == 0 && cancelled_.ok()) {
      return absl::DeadlineExceededError(absl::StrCat("no node has set '", key, "'"));
    }
  }
}

absl::Status Rendezvous::Cancelled() const {
  MutexLock lock(&mutex_);
  return cancelled_;
}

absl::Status Rendezvous::Put(const std::string& key, const std::string& value) {
  std::vector<std::function<void(const std::string&)>> waiting;
  {
    MutexLock lock(&mutex_);
    if (!cancelled_.ok()) return absl::OkStatus();
    if (key.empty() || key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes ||
        values_.size() >= kMaxKeys || !values_.emplace(key, value).second) {
      return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                       "a rendezvous key or value is too long, there are too many keys, or this "
                       "key is already set");
    }
    waiting = std::move(waiting_[key]);
    awaited_ -= waiting.size();
    waiting_.erase(key);
  }
  changed_.NotifyAll();
  for (const auto& answer : waiting) answer(value);
  return absl::OkStatus();
}

absl::Status Rendezvous::When(const std::string& key,
                              std::function<void(const std::string&)> answer) {
  std::string value;
  {
    MutexLock lock(&mutex_);
    if (!cancelled_.ok()) return absl::OkStatus();
    const auto found = values_.find(key);
    if (found == values_.end()) {
      if (key.size() > kMaxKeyBytes || awaited_ >= kMaxKeys) {
        return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                         "too many rendezvous keys are asked for, or one that is too long");
      }
      waiting_[key].push_back(std::move(answer));
      ++awaited_;
      return absl::OkStatus();
    }
    value = found->second;
  }
  answer(value);
  return absl::OkStatus();
}

void Rendezvous::Cancel(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (cancelled_.ok()) cancelled_ = why;
    values_.clear();
    asked_.clear();
    waiting_.clear();
    awaited_ = 0;
  }
  changed_.NotifyAll();
}

}  // namespace gradsync::daemon
