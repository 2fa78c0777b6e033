#include "daemon/reduce/user_shares.h"

#include <algorithm>

namespace gradsync::daemon {
namespace {

// Bytes that are read and written in a nanosecond, roughly: 13 GB/s.
constexpr std::uint64_t kBytesPerNs = 13;

}  // namespace

UserShares::User* UserShares::Of(const Tenant& id) {
  for (const auto& user : users_) {
    if (user->id == id) return user.get();
  }
  // Forgets one that has had no more than those who want turns.
  for (const auto& user : users_) {
    if (user->wanted > 0 || user->running > 0 || user->served > served_) continue;
    *user = User{id, ++last_number_, 0, 0, 0, 0};
    return user.get();
  }
  users_.push_back(std::make_unique<User>());
  users_.back()->id = id;
  users_.back()->number = ++last_number_;
  return users_.back().get();
}

void UserShares::Want(User* user) {
  if (user->wanted++ == 0) user->served = std::max(user->served, served_);
}

void UserShares::Begin(User* user, std::uint64_t bytes) {
  served_ = user->served;
  user->served += bytes;
  ++user->running;
}

std::uint64_t UserShares::End(User* user, std::uint64_t bytes, std::uint64_t ns) {
  --user->running;
  const std::uint64_t took = std::min(ns * kBytesPerNs, kMostTimes * bytes);
  if (took <= bytes) return 0;
  user->served += took - bytes;
  return took - bytes;
}

}  // namespace gradsync::daemon
