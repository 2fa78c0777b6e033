#include "daemon/peer/peer_turns.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace gradsync::daemon {

bool UserTurns::HasShare(std::uint64_t now_ns) const {
  constexpr std::uint64_t kAheadNs = PeerTurns::kTimePerUse * PeerTurns::kBurstNs;
  return paid_ns_.load() <= now_ns + kAheadNs;
}

void UserTurns::Add(std::uint64_t begin_ns, MessageWeight weight, Take take) {
  const bool at_once =
      weight == MessageWeight::kUrgent || (weight == MessageWeight::kLight && HasShare(begin_ns));
  if (!at_once) {
    Charge(begin_ns, turns_->clock_->NowNs());
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
  if (const auto found = users_.find(user); found != users_.end()) return found->second;
  // Anyone may name any user.
  const std::uint64_t now_ns = clock_->NowNs();
  for (auto it = users_.begin(); it != users_.end();) {
    const bool unused = it->second.use_count() == 1 && it->second->HasPaid(now_ns);
    it = unused ? users_.erase(it) : std::next(it);
  }
  auto turns = std::make_shared<UserTurns>(this, user);
  users_[user] = turns;
  return turns;
}

Tenant LocalStrangers() {
  return Tenant(kStrangers.uid, PodId::Parse("00000000000000000000000000000001").value_or(PodId()));
}

}  // namespace gradsync::daemon
