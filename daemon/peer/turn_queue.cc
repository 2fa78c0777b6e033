#include "daemon/peer/turn_queue.h"

#include <algorithm>
#include <utility>

namespace gradsync::daemon {

std::optional<TurnQueue::Turn> TurnQueue::Add(const Tenant& user, const std::string& address,
                                              Take take) {
  if (const auto found = waiting_.find({user, address}); found != waiting_.end()) {
    found->second.takes.push_back(std::move(take));
    return std::nullopt;  // otherwise the messages before it would not wait
  }
  Messages messages;
  messages.takes.push_back(std::move(take));
  Wait(user, address, std::move(messages));
  if (!CanBegin(last_ticket_, user, address)) return std::nullopt;
  return Begin(user, address);
}

std::vector<TurnQueue::Turn> TurnQueue::End(const Tenant& user, const std::string& address) {
  users_.at(user).busy = false;
  if (!address.empty()) addresses_.at(address).busy = false;
  std::vector<Turn> turns;
  // Nothing else has become free, so only their messages can begin.
  while (const auto next = Earlier(FirstOf(user), FirstAt(address))) {
    turns.push_back(Begin(next->user, next->address));
  }
  if (const User& ended = users_.at(user); !ended.busy && ended.addresses.empty()) {
    users_.erase(user);
  }
  if (const auto ended = addresses_.find(address);
      ended != addresses_.end() && !ended->second.busy && ended->second.users.empty()) {
    addresses_.erase(ended);
  }
  return turns;
}

void TurnQueue::Wait(const Tenant& user, const std::string& address, Messages messages) {
  messages.ticket = ++last_ticket_;
  users_[user].addresses[messages.ticket] = address;
  if (!address.empty()) addresses_[address].users[messages.ticket] = user;
  waiting_.emplace(std::make_pair(user, address), std::move(messages));
}

bool TurnQueue::IsIdle(const std::string& address) const {
  return address.empty() || !addresses_.at(address).busy;
}

bool TurnQueue::CanBegin(Ticket ticket, const Tenant& user, const std::string& address) const {
  const User& state = users_.at(user);
  return !state.busy && ticket <= state.passed.value_or(ticket) && IsIdle(address);
}

std::optional<TurnQueue::Candidate> TurnQueue::FirstOf(const Tenant& user) const {
  const User& state = users_.at(user);
  if (state.busy) return std::nullopt;
  for (const auto& [ticket, address] : state.addresses) {
    if (CanBegin(ticket, user, address)) return Candidate{ticket, user, address};
  }
  return std::nullopt;
}

std::optional<TurnQueue::Candidate> TurnQueue::FirstAt(const std::string& address) const {
  if (address.empty() || !IsIdle(address)) return std::nullopt;
  for (const auto& [ticket, user] : addresses_.at(address).users) {
    if (CanBegin(ticket, user, address)) return Candidate{ticket, user, address};
  }
  return std::nullopt;
}

std::optional<TurnQueue::Candidate> TurnQueue::Earlier(std::optional<Candidate> one,
                                                       std::optional<Candidate> other) {
  if (!one.has_value()) return other;
  return other.has_value() && other->ticket < one->ticket ? other : one;
}

TurnQueue::Turn TurnQueue::Begin(const Tenant& user, const std::string& address) {
  const auto found = waiting_.find({user, address});
  Messages messages = std::move(found->second);
  waiting_.erase(found);
  User& state = users_.at(user);
  state.busy = true;
  if (state.passed == messages.ticket) state.passed.reset();
  state.addresses.erase(messages.ticket);
  if (!address.empty()) {
    addresses_.at(address).busy = true;
    addresses_.at(address).users.erase(messages.ticket);
    NotePassed(messages.ticket, address);
  }
  Turn turn{user, address, std::move(messages.takes.front())};
  messages.takes.pop_front();
  if (!messages.takes.empty()) Wait(user, address, std::move(messages));
  return turn;
}

void TurnQueue::NotePassed(Ticket ticket, const std::string& address) {
  const std::map<Ticket, Tenant>& users = addresses_.at(address).users;
  std::for_each(users.begin(), users.lower_bound(ticket), [&](const auto& one) {
    User& state = users_.at(one.second);
    if (state.busy) state.passed = std::min(state.passed.value_or(one.first), one.first);
  });
}

}  // namespace gradsync::daemon
