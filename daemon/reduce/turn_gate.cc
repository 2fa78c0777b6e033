#include "daemon/reduce/turn_gate.h"

#include <algorithm>

namespace gradsync::daemon {

TurnGate::TurnGate(int at_once, const Clock* clock)
    : at_once_(static_cast<std::size_t>(std::max(1, at_once))), clock_(clock) {}

void TurnGate::Client::Close() {
  if (gate_ == nullptr) return;
  const MutexLock lock(&gate_->mutex_);
  closed_ = true;
  for (Waiter* const waiter : gate_->waiting_) {
    if (waiter->client == this) waiter->changed.NotifyOne();
  }
}

TurnGate::Turn::Turn(Client* client, std::uint64_t bytes)
    : gate_(client->gate_), bytes_(bytes), given_(true) {
  if (gate_ == nullptr) return;
  user_ = gate_->Begin(client, bytes);
  given_ = user_ != nullptr;
  if (given_) start_ns_ = gate_->NowNs();
}

TurnGate::Turn::~Turn() {
  if (user_ != nullptr) gate_->End(user_, bytes_, gate_->NowNs() - start_ns_);
}

UserShares::User* TurnGate::Begin(Client* client, std::uint64_t bytes) {
  const MutexLock lock(&mutex_);
  if (client->closed_) return nullptr;
  UserShares::User* const user = users_.Of(client->user_);
  users_.Want(user);
  if (running_ < at_once_) {
    BeginLocked(user, bytes);
    return user;
  }
  Waiter waiter;
  waiter.client = client;
  waiter.user = user;
  waiter.bytes = bytes;
  waiting_.push_back(&waiter);
  while (!waiter.given && !client->closed_) waiter.changed.Wait(&mutex_);
  if (waiter.given) return user;
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &waiter));
  users_.Unwant(user);
  return nullptr;
}

void TurnGate::BeginLocked(UserShares::User* user, std::uint64_t bytes) {
  users_.Unwant(user);
  users_.Begin(user, bytes);
  ++running_;
}

void TurnGate::End(UserShares::User* user, std::uint64_t bytes, std::uint64_t ns) {
  const MutexLock lock(&mutex_);
  users_.End(user, bytes, ns);
  --running_;
  GiveLocked();
}

void TurnGate::GiveLocked() {
  const auto next = std::min_element(
      waiting_.begin(), waiting_.end(),
      [](const Waiter* a, const Waiter* b) { return a->user->served < b->user->served; });
  if (next == waiting_.end()) return;
  Waiter* const waiter = *next;
  waiting_.erase(next);
  BeginLocked(waiter->user, waiter->bytes);
  waiter->given = true;
  waiter->changed.NotifyOne();
}

std::size_t TurnGate::waiting() const {
  const MutexLock lock(&mutex_);
  return waiting_.size();
}

}  // namespace gradsync::daemon
