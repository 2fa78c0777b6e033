#include "daemon/peer/peer_turns.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"

namespace gradsync::daemon {

namespace {

// Adds a use to the time at which its share will have paid.
void Pay(std::uint64_t begin_ns, std::uint64_t price_ns, std::atomic<std::uint64_t>* paid_at) {
  std::uint64_t paid_ns = paid_at->load();
  while (!paid_at->compare_exchange_weak(paid_ns, std::max(paid_ns, begin_ns) + price_ns)) {
  }
}

// Forgets those that no stream has and that have paid. Anyone may name any user.
template <typename Map>
void Prune(std::uint64_t now_ns, Map* turns) {
  for (auto it = turns->begin(); it != turns->end();) {
    const bool unused = it->second.use_count() == 1 && it->second->HasPaid(now_ns);
    it = unused ? turns->erase(it) : std::next(it);
  }
}

// A tenant that nobody is.
Tenant Nobody(std::uint64_t number) {
  return Tenant(kStrangers.uid, PodId::Parse(absl::StrFormat("%032x", number)).value_or(PodId()));
}

}  // namespace

bool AddressTurns::HasShare(std::uint64_t now_ns) const {
  constexpr std::uint64_t kAheadNs = PeerTurns::kTimePerUseOfAddress * PeerTurns::kBurstNs;
  return paid_ns_.load() <= now_ns + kAheadNs;
}

void AddressTurns::Wait(const Tenant& user, Take take) {
  const MutexLock lock(&mutex_);
  const auto [queue, is_new] = waiting_.try_emplace(user);
  queue->second.push_back(std::move(take));
  if (is_new) turns_.push_back(user);
}

AddressTurns::Take AddressTurns::Next() {
  const MutexLock lock(&mutex_);
  const Tenant user = turns_.front();
  turns_.pop_front();
  const auto queue = waiting_.find(user);
  Take take = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) {
    waiting_.erase(queue);
  } else {
    turns_.push_back(user);
  }
  return take;
}

bool UserTurns::HasShare(std::uint64_t now_ns) const {
  constexpr std::uint64_t kAheadNs = PeerTurns::kTimePerUse * PeerTurns::kBurstNs;
  return paid_ns_.load() <= now_ns + kAheadNs;
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
  if (address == nullptr) {
    turns_->executor_->Run(
        user_, [turns = turns_, take = std::move(take)] { take(/*drop=*/turns->stopped_.load()); });
    return;
  }
  address->Wait(user_, std::move(take));
  turns_->executor_->Run(address->key_, [turns = turns_, address] {
    address->Next()(/*drop=*/turns->stopped_.load());
  });
}

void UserTurns::Charge(std::uint64_t begin_ns, AddressTurns* address) {
  const std::uint64_t use_ns = turns_->clock_->NowNs() - begin_ns + PeerTurns::kReadNs;
  Pay(begin_ns, PeerTurns::kTimePerUse * use_ns, &paid_ns_);
  if (address == nullptr) return;
  Pay(begin_ns, PeerTurns::kTimePerUseOfAddress * use_ns, &address->paid_ns_);
}

std::shared_ptr<UserTurns> PeerTurns::Of(const Tenant& user) {
  MutexLock lock(&mutex_);
  if (const auto found = users_.find(user); found != users_.end()) return found->second;
  Prune(clock_->NowNs(), &users_);
  auto turns = std::make_shared<UserTurns>(this, user);
  users_[user] = turns;
  return turns;
}

std::shared_ptr<AddressTurns> PeerTurns::OfAddress(const std::string& address) {
  MutexLock lock(&mutex_);
  if (const auto found = addresses_.find(address); found != addresses_.end()) return found->second;
  Prune(clock_->NowNs(), &addresses_);
  auto turns = std::make_shared<AddressTurns>(Nobody(++last_address_));
  addresses_[address] = turns;
  return turns;
}

Tenant LocalStrangers() { return Nobody(1); }

}  // namespace gradsync::daemon
