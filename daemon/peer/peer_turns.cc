#include "daemon/peer/peer_turns.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

namespace gradsync::daemon {
namespace {

// Forgets those that no stream has and that have paid. Anyone may name any user.
template <typename Map>
void Prune(std::uint64_t now_ns, Map* turns) {
  for (auto it = turns->begin(); it != turns->end();) {
    const bool unused = it->second.use_count() == 1 && it->second->HasPaid(now_ns);
    it = unused ? turns->erase(it) : std::next(it);
  }
}

}  // namespace

void ReadingShare::Pay(std::uint64_t begin_ns, std::uint64_t price_ns) {
  std::uint64_t paid_ns = paid_ns_.load();
  while (!paid_ns_.compare_exchange_weak(paid_ns, std::max(paid_ns, begin_ns) + price_ns)) {
  }
}

bool AddressTurns::HasShare(std::uint64_t now_ns) const {
  constexpr std::uint64_t kAheadNs = PeerTurns::kTimePerUseOfAddress * PeerTurns::kBurstNs;
  constexpr std::uint64_t kAheadOfNetworkNs =
      2 * PeerTurns::kBurstNs / PeerTurns::kUseOfNetworkInTwo;
  return share_.Has(now_ns, kAheadNs) && network_->Has(now_ns, kAheadOfNetworkNs);
}

void AddressTurns::Charge(std::uint64_t begin_ns, std::uint64_t use_ns) {
  // What an address uses beyond its share is no debt of its neighbours.
  const bool in_share = share_.Has(begin_ns, PeerTurns::kTimePerUseOfAddress * PeerTurns::kBurstNs);
  share_.Pay(begin_ns, PeerTurns::kTimePerUseOfAddress * use_ns);
  if (in_share) network_->Pay(begin_ns, 2 * use_ns / PeerTurns::kUseOfNetworkInTwo);
}

bool UserTurns::HasShare(std::uint64_t now_ns) const {
  return share_.Has(now_ns, PeerTurns::kTimePerUse * PeerTurns::kBurstNs);
}

void UserTurns::Add(std::uint64_t begin_ns, MessageWeight weight, Take take,
                    const std::shared_ptr<AddressTurns>& address) {
  const bool share = HasShare(begin_ns) && (address == nullptr || address->HasShare(begin_ns));
  if (weight == MessageWeight::kUrgent || (weight == MessageWeight::kLight && share)) {
    take(/*drop=*/turns_->stopped_.load());
    Charge(begin_ns, address.get());
    return;
  }
  Charge(begin_ns, address.get());
  turns_->Wait(user_, address == nullptr ? "" : address->address(), std::move(take));
}

void UserTurns::Charge(std::uint64_t begin_ns, AddressTurns* address) {
  const std::uint64_t use_ns = turns_->clock_->NowNs() - begin_ns + PeerTurns::kReadNs;
  share_.Pay(begin_ns, PeerTurns::kTimePerUse * use_ns);
  if (address != nullptr) address->Charge(begin_ns, use_ns);
}

void PeerTurns::Wait(const Tenant& user, const std::string& address, TurnQueue::Take take) {
  std::optional<TurnQueue::Turn> turn;
  {
    const MutexLock lock(&queue_mutex_);
    turn = queue_.Add(user, address, std::move(take));
  }
  if (turn.has_value()) Run(*std::move(turn));
}

void PeerTurns::Run(TurnQueue::Turn turn) {
  const Tenant user = turn.user;
  executor_->Run(user, [this, turn = std::move(turn)]() mutable {
    turn.take(/*drop=*/stopped_.load());
    turn.take = nullptr;  // may free memory
    std::vector<TurnQueue::Turn> next;
    {
      const MutexLock lock(&queue_mutex_);
      next = queue_.End(turn.user, turn.address);
    }
    for (TurnQueue::Turn& one : next) Run(std::move(one));
  });
}

std::shared_ptr<UserTurns> PeerTurns::Of(const Tenant& user) {
  MutexLock lock(&mutex_);
  if (const auto found = users_.find(user); found != users_.end()) return found->second;
  Prune(clock_->NowNs(), &users_);
  auto turns = std::make_shared<UserTurns>(this, user);
  users_[user] = turns;
  return turns;
}

std::shared_ptr<AddressTurns> PeerTurns::OfAddress(const std::string& address,
                                                   const std::string& network) {
  MutexLock lock(&mutex_);
  if (const auto found = addresses_.find(address); found != addresses_.end()) return found->second;
  Prune(clock_->NowNs(), &addresses_);
  auto share = networks_.find(network);
  if (share == networks_.end()) {
    Prune(clock_->NowNs(), &networks_);
    share = networks_.try_emplace(network, std::make_shared<ReadingShare>()).first;
  }
  auto turns = std::make_shared<AddressTurns>(address, share->second);
  addresses_[address] = turns;
  return turns;
}

Tenant LocalStrangers() {
  return Tenant(kStrangers.uid, PodId::Parse("00000000000000000000000000000001").value_or(PodId()));
}

}  // namespace gradsync::daemon
