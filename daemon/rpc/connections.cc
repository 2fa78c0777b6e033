#include "daemon/rpc/connections.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace gradsync::daemon {
namespace {

// The daemon's own descriptors are below kFirstNumber. A rotation through 64 Ki is long enough.
constexpr int kFirstNumber = 256;
constexpr int kHighestLimit = 1 << 16;

int DescriptorLimit() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int>(std::min<rlim_t>(limit.rlim_cur, kHighestLimit));
}

}  // namespace

Connections::Connections(DescriptorQuota* quota)
    : quota_(quota), limit_(DescriptorLimit()), next_number_(kFirstNumber) {}

absl::StatusOr<Connections::Admitted> Connections::Admit(const UniqueFd& accepted,
                                                         const ClientProcess& process) {
  const Tenant tenant = process.tenant();
  MutexLock lock(&mutex_);
  const auto user = per_user_.find(tenant);
  if (user != per_user_.end() && user->second >= kPerUser) {
    return absl::ResourceExhaustedError(
        absl::StrCat("user ", tenant.Text(), " has ", user->second,
                     " connections, as many as it may; close some"));
  }
  auto descriptors = quota_->TakeForConnection(tenant, kDescriptors - 1);
  if (!descriptors.ok()) return descriptors.status();
  auto for_grpc = quota_->TakeForConnection(tenant, 1);
  if (!for_grpc.ok()) return for_grpc.status();
  if (next_number_ >= limit_) next_number_ = std::min(kFirstNumber, limit_ / 2);
  int number = fcntl(accepted.get(), F_DUPFD_CLOEXEC, next_number_);
  if (number < 0) number = fcntl(accepted.get(), F_DUPFD_CLOEXEC, 0);
  if (number < 0) return absl::ErrnoToStatus(errno, "a connection's descriptor");
  next_number_ = number + 1;
  if (const auto old = by_number_.find(number); old != by_number_.end()) EraseLocked(old);
  ++per_user_[tenant];
  auto input = std::make_shared<ClientInput>();
  by_number_[number] = Entry{++last_id_, process, *std::move(descriptors), input};
  return Admitted{UniqueFd(number), *std::move(for_grpc), last_id_, std::move(input)};
}

void Connections::EraseLocked(std::map<int, Entry>::iterator entry) {
  const auto user = per_user_.find(entry->second.process.tenant());
  if (--user->second == 0) per_user_.erase(user);
  by_number_.erase(entry);
}

void Connections::Remove(std::uint64_t id) {
  MutexLock lock(&mutex_);
  for (auto it = by_number_.begin(); it != by_number_.end(); ++it) {
    if (it->second.id == id) {
      EraseLocked(it);
      return;
    }
  }
}

bool Connections::IsFull(const Tenant& user) const {
  return Count(user) >= kPerUser || quota_->Of(user) + kDescriptors > quota_->per_user();
}

std::size_t Connections::Count(const Tenant& user) const {
  MutexLock lock(&mutex_);
  const auto found = per_user_.find(user);
  return found == per_user_.end() ? 0 : found->second;
}

void Connections::CountRefused(const Tenant& user) {
  MutexLock lock(&mutex_);
  if (refused_.size() >= kMostRefusedUsers && refused_.count(user) == 0) {
    for (auto it = refused_.begin(); it != refused_.end();) {
      it = per_user_.count(it->first) == 0 ? refused_.erase(it) : std::next(it);
    }
  }
  ++refused_[user];
}

std::map<Tenant, Connections::Usage> Connections::Users() const {
  std::map<Tenant, Usage> users;
  MutexLock lock(&mutex_);
  for (const auto& [user, open] : per_user_) users[user].open = open;
  for (const auto& [user, refused] : refused_) users[user].refused = refused;
  return users;
}

const Connections::Entry* Connections::FindLocked(const std::string& caller) const {
  absl::string_view text = caller;
  int number = -1;
  if (!absl::ConsumePrefix(&text, "fd:") || !absl::SimpleAtoi(text, &number)) return nullptr;
  const auto found = by_number_.find(number);
  return found == by_number_.end() ? nullptr : &found->second;
}

std::optional<ClientProcess> Connections::Find(const std::string& caller) const {
  MutexLock lock(&mutex_);
  const Entry* const entry = FindLocked(caller);
  if (entry == nullptr) return std::nullopt;
  return entry->process;
}

std::shared_ptr<ClientInput> Connections::Input(const std::string& caller) const {
  MutexLock lock(&mutex_);
  const Entry* const entry = FindLocked(caller);
  return entry == nullptr ? nullptr : entry->input;
}

}  // namespace gradsync::daemon
