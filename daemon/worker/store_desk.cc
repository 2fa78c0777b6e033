#include "daemon/worker/store_desk.h"

#include <utility>

#include "absl/status/statusor.h"

namespace gradsync::daemon {

absl::Status StoreDesk::Take(const worker::EngineEvent& event) {
  if (event.has_set()) return store_->Set(event.set().key(), event.set().value());
  const std::string& key = event.get();
  if (key.size() > RendezvousStore::kMaxKeyBytes || asked_.size() >= RendezvousStore::kMaxKeys ||
      !asked_.insert(key).second) {
    refused_ = true;
  } else {
    wanted_.push_back(key);
  }
  return absl::OkStatus();
}

absl::Status StoreDesk::Look(
    absl::Duration patience,
    absl::FunctionRef<void(const std::string& key, const std::string& value)> answer) {
  std::string key = std::move(wanted_.front());
  wanted_.pop_front();
  const absl::StatusOr<std::string> value = store_->Get(key, patience);
  if (value.ok()) {
    answer(key, *value);
    return absl::OkStatus();
  }
  if (!absl::IsDeadlineExceeded(value.status())) return value.status();
  wanted_.push_back(std::move(key));
  return absl::OkStatus();
}

}  // namespace gradsync::daemon
