#include "daemon/peer/peer_turns.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace gradsync::daemon {

void UserTurns::Add(MessageWeight weight, Take take) {
  const std::uint64_t begin_ns = turns_->clock_->NowNs();
  const std::uint64_t ahead_ns = PeerTurns::kTimePerUse * PeerTurns::kBurstNs;
  const bool at_once = weight == MessageWeight::kUrgent ||
                       (weight == MessageWeight::kLight && paid_ns_.load() <= begin_ns + ahead_ns);
  if (!at_once) {
    turns_->executor_->Run(
        user_, [turns = turns_, take = std::move(take)] { take(/*drop=*/turns->stopped_.load()); });
    return;
  }
  take(/*drop=*/turns_->stopped_.load());
  Charge(begin_ns, turns_->clock_->NowNs());
}

void UserTurns::Charge(std::uint64_t begin_ns, std::uint64_t end_ns) {
  const std::uint64_t price_ns = PeerTurns::kTimePerUse * (end_ns - begin_ns + PeerTurns::kReadNs);
  std::uint64_t paid_ns = paid_ns_.load();
  while (!paid_ns_.compare_exchange_weak(paid_ns, std::max(paid_ns, begin_ns) + price_ns)) {
  }
}

std::shared_ptr<UserTurns> PeerTurns::Of(const Tenant& user) {
  MutexLock lock(&mutex_);
  if (const auto found = users_.find(user); found != users_.end()) {
    if (auto turns = found->second.lock()) return turns;
  }
  // Anyone may name any user.
  for (auto it = users_.begin(); it != users_.end();) {
    it = it->second.expired() ? users_.erase(it) : std::next(it);
  }
  auto turns = std::make_shared<UserTurns>(this, user);
  users_[user] = turns;
  return turns;
}

}  // namespace gradsync::daemon
