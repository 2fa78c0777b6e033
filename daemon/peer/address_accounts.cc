#include "daemon/peer/address_accounts.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

// What an address or a network may have.
struct AddressAccounts::Bound {
  std::string name;
  std::uint64_t bytes = 0;
  std::size_t users = 0;
};

class AddressAccounts::Origin final : public MemoryOrigin {
 public:
  Origin(std::shared_ptr<State> state, std::vector<Bound> bounds)
      : state_(std::move(state)), bounds_(std::move(bounds)) {}

  absl::Status Take(std::uint64_t bytes) override {
    const MutexLock lock(&state_->mutex);
    for (const Bound& bound : bounds_) {
      const auto found = state_->addresses.find(bound.name);
      const std::uint64_t held = found == state_->addresses.end() ? 0 : found->second.bytes;
      // held <= bound.bytes, so the subtraction cannot wrap.
      if (bytes > bound.bytes - held) return TooMuch(bound, held, bytes);
    }
    if (bytes == 0) return absl::OkStatus();
    for (const Bound& bound : bounds_) state_->addresses[bound.name].bytes += bytes;
    return absl::OkStatus();
  }

  void GiveBack(std::uint64_t bytes) override {
    if (bytes == 0) return;
    const MutexLock lock(&state_->mutex);
    for (const Bound& bound : bounds_) {
      state_->addresses[bound.name].bytes -= bytes;
      state_->DropIfUnusedLocked(bound.name);
    }
  }

 private:
  static absl::Status TooMuch(const Bound& bound, std::uint64_t held, std::uint64_t bytes) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("the nodes of ", bound.name, " make this daemon keep ", held,
                     " bytes and ask for ", bytes, " more; ", bound.bytes,
                     " allowed: end jobs of these nodes, or raise quota_control_bytes_per_user"),
        {{field::kAddress, bound.name}});
  }

  const std::shared_ptr<State> state_;
  const std::vector<Bound> bounds_;
};

// Counts a user for an address once more.
class AddressAccounts::User {
 public:
  User(std::shared_ptr<State> state, std::vector<Bound> bounds, uid_t user)
      : state_(std::move(state)), bounds_(std::move(bounds)), user_(user) {
    state_->mutex.AssertHeld();
    for (const Bound& bound : bounds_) ++state_->addresses[bound.name].users[user_];
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;
  ~User() {
    const MutexLock lock(&state_->mutex);
    for (const Bound& bound : bounds_) {
      std::map<uid_t, std::size_t>& users = state_->addresses[bound.name].users;
      const auto found = users.find(user_);
      if (--found->second == 0) users.erase(found);
      state_->DropIfUnusedLocked(bound.name);
    }
  }

 private:
  const std::shared_ptr<State> state_;
  const std::vector<Bound> bounds_;
  const uid_t user_;
};

void AddressAccounts::State::DropIfUnusedLocked(const std::string& address) {
  const auto found = addresses.find(address);
  if (found->second.users.empty() && found->second.bytes == 0) addresses.erase(found);
}

absl::StatusOr<AddressAccounts::Account> AddressAccounts::Open(const std::string& address,
                                                               const std::string& network,
                                                               uid_t user) {
  std::vector<Bound> bounds = {{address, kQuotas * bytes_per_user_, kUsers}};
  if (network != address) {
    bounds.push_back({network, kQuotasOfNetwork * bytes_per_user_, kUsersOfNetwork});
  }
  Account account;
  account.memory = std::make_shared<Origin>(state_, bounds);
  const MutexLock lock(&state_->mutex);
  for (const Bound& bound : bounds) {
    const auto found = state_->addresses.find(bound.name);
    if (found == state_->addresses.end() || found->second.users.count(user) > 0) continue;
    if (found->second.users.size() < bound.users) continue;
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                     absl::StrCat("the nodes of ", bound.name, " have joined jobs of ", bound.users,
                                  " users here, as many as they may: end jobs of these nodes"),
                     {{field::kAddress, bound.name}});
  }
  account.user = std::make_shared<User>(state_, std::move(bounds), user);
  return account;
}

std::uint64_t AddressAccounts::BytesOf(const std::string& address) const {
  const MutexLock lock(&state_->mutex);
  const auto found = state_->addresses.find(address);
  return found == state_->addresses.end() ? 0 : found->second.bytes;
}

}  // namespace gradsync::daemon
