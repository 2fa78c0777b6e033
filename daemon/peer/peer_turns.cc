#include "daemon/peer/peer_turns.h"

#include <algorithm>
#include <iterator>
#include <utility>

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

}  // namespace

bool AddressTurns::HasShare(std::uint64_t now_ns) const {
  constexpr std::uint64_t kAheadNs = PeerTurns::kTimePerUseOfNetwork * PeerTurns::kBurstNs;
  return share_->paid_ns_.load() <= now_ns + kAheadNs;
}

bool AddressTurns::Begin(const std::shared_ptr<UserTurns>& user) {
  const MutexLock lock(&mutex_);
  if (!busy_) return busy_ = true;
  waiting_.push_back(user);
  return false;
}

std::shared_ptr<UserTurns> AddressTurns::End() {
  const MutexLock lock(&mutex_);
  busy_ = false;
  if (waiting_.empty()) return nullptr;
  std::shared_ptr<UserTurns> user = std::move(waiting_.front());
  waiting_.pop_front();
  return user;
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
  Wait(address, std::move(take));
}

void UserTurns::Wait(const std::shared_ptr<AddressTurns>& address, Take take) {
  {
    const MutexLock lock(&mutex_);
    auto of_address = std::find_if(waiting_.begin(), waiting_.end(),
                                   [&](const Waiting& one) { return one.address == address; });
    if (of_address == waiting_.end()) {
      of_address = waiting_.insert(waiting_.end(), Waiting{address, {}});
    }
    of_address->takes.push_back(std::move(take));
    if (scheduled_ || of_address->parked) return;
    scheduled_ = true;
  }
  Schedule();
}

void UserTurns::Schedule() {
  turns_->executor_->Run(user_, [self = shared_from_this()] { self->RunNext(); });
}

void UserTurns::RunNext() {
  Take take;
  std::shared_ptr<AddressTurns> address;
  {
    const MutexLock lock(&mutex_);
    for (std::size_t left = waiting_.size(); take == nullptr && left > 0; --left) {
      Waiting first = std::move(waiting_.front());
      waiting_.pop_front();
      if (!first.parked && first.address->Begin(shared_from_this())) {
        address = first.address;
        take = std::move(first.takes.front());
        first.takes.pop_front();
      } else {
        first.parked = true;
      }
      if (!first.takes.empty()) waiting_.push_back(std::move(first));
    }
    if (take == nullptr) {
      scheduled_ = false;
      return;
    }
  }
  take(/*drop=*/turns_->stopped_.load());
  take = nullptr;  // may free memory
  if (const auto next = address->End()) next->Resume(address.get());
  {
    const MutexLock lock(&mutex_);
    scheduled_ = std::any_of(waiting_.begin(), waiting_.end(),
                             [](const Waiting& one) { return !one.parked; });
    if (!scheduled_) return;
  }
  Schedule();
}

void UserTurns::Resume(const AddressTurns* address) {
  {
    const MutexLock lock(&mutex_);
    for (Waiting& one : waiting_) one.parked = one.parked && one.address.get() != address;
    if (std::exchange(scheduled_, true)) return;
  }
  Schedule();
}

void UserTurns::Charge(std::uint64_t begin_ns, AddressTurns* address) {
  const std::uint64_t use_ns = turns_->clock_->NowNs() - begin_ns + PeerTurns::kReadNs;
  Pay(begin_ns, PeerTurns::kTimePerUse * use_ns, &paid_ns_);
  if (address == nullptr) return;
  Pay(begin_ns, PeerTurns::kTimePerUseOfNetwork * use_ns, &address->share_->paid_ns_);
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
    share = networks_.try_emplace(network, std::make_shared<NetworkShare>()).first;
  }
  auto turns = std::make_shared<AddressTurns>(share->second);
  addresses_[address] = turns;
  return turns;
}

Tenant LocalStrangers() {
  return Tenant(kStrangers.uid, PodId::Parse("00000000000000000000000000000001").value_or(PodId()));
}

}  // namespace gradsync::daemon
