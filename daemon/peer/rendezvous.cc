#include "daemon/peer/rendezvous.h"

#include <atomic>
#include <future>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync {

Rendezvous::Rendezvous(std::function<void(const std::string&, const std::string&)> set,
                       std::function<void(const std::string&)> ask)
    : set_(std::move(set)), ask_(std::move(ask)) {}

absl::Status Rendezvous::Set(const std::string& key, const std::string& value) {
  if (set_ == nullptr) return Put(key, value);
  set_(key, value);
  return absl::OkStatus();
}

absl::StatusOr<std::string> Rendezvous::Get(const std::string& key, absl::Duration timeout) {
  // A wait with a time limit, which CondVar has not; no more than one thread waits here.
  const auto answer = std::make_shared<std::promise<absl::StatusOr<std::string>>>();
  const auto answered = std::make_shared<std::atomic<bool>>(false);
  std::future<absl::StatusOr<std::string>> result = answer->get_future();
  absl::Status asked = When(key, [answer, answered](const std::string& value) {
    if (!answered->exchange(true)) answer->set_value(value);
  });
  if (!asked.ok()) return asked;
  if (ask_ != nullptr) ask_(key);
  if (result.wait_for(absl::ToChronoNanoseconds(timeout)) != std::future_status::ready) {
    return absl::DeadlineExceededError(absl::StrCat("no node has set '", key, "'"));
  }
  auto value = result.get();
  MutexLock lock(&mutex_);
  if (!cancelled_.ok()) return cancelled_;
  return value;
}

absl::Status Rendezvous::Put(const std::string& key, const std::string& value) {
  std::vector<std::function<void(const std::string&)>> waiting;
  {
    MutexLock lock(&mutex_);
    if (key.empty() || key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes ||
        values_.size() >= kMaxKeys || !values_.emplace(key, value).second) {
      return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED",
                       "a rendezvous key that is too long, one too many, or set before");
    }
    waiting = std::move(waiting_[key]);
    waiting_.erase(key);
  }
  for (const auto& answer : waiting) answer(value);
  return absl::OkStatus();
}

absl::Status Rendezvous::When(const std::string& key,
                              std::function<void(const std::string&)> answer) {
  std::string value;
  {
    MutexLock lock(&mutex_);
    if (!cancelled_.ok()) return cancelled_;
    const auto found = values_.find(key);
    if (found == values_.end()) {
      auto& waiting = waiting_[key];
      if (key.size() > kMaxKeyBytes || waiting_.size() > kMaxKeys || waiting.size() > kMaxKeys) {
        return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED",
                         "too many rendezvous keys are asked for, or one that is too long");
      }
      waiting.push_back(std::move(answer));
      return absl::OkStatus();
    }
    value = found->second;
  }
  answer(value);
  return absl::OkStatus();
}

void Rendezvous::Cancel(const absl::Status& why) {
  std::map<std::string, std::vector<std::function<void(const std::string&)>>> waiting;
  {
    MutexLock lock(&mutex_);
    if (cancelled_.ok()) cancelled_ = why;
    waiting.swap(waiting_);
  }
  if (ask_ == nullptr && set_ != nullptr) return;
  // Wakes this node's own Get, which looks at cancelled_; agents are told by EngineEnd.
  for (const auto& [key, answers] : waiting) {
    for (const auto& answer : answers) answer("");
  }
}

}  // namespace gradsync
