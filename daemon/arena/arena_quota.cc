#include "daemon/arena/arena_quota.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

ArenaQuota::~ArenaQuota() { assert(held_.empty()); }

absl::StatusOr<ArenaQuota::Reservation> ArenaQuota::Reserve(const Tenant& user, std::uint64_t bytes,
                                                            std::shared_ptr<MemoryOrigin> origin) {
  if (absl::Status taken = Take(user, bytes, origin.get()); !taken.ok()) return taken;
  return Reservation(this, user, bytes, std::move(origin));
}

absl::Status ArenaQuota::Take(const Tenant& user, std::uint64_t bytes, MemoryOrigin* origin) {
  MutexLock lock(&mutex_);
  const auto found = held_.find(user);
  const std::uint64_t held = found == held_.end() ? 0 : found->second;
  // held <= the quota, so the subtraction cannot wrap, whatever `bytes` is.
  if (bytes > bytes_per_user_ - held) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("user ", user.Text(), " asks for ", bytes, " bytes of ", what_, " and holds ",
                     held, " of a quota of ", bytes_per_user_, " (", option_,
                     "): ask for less, end other jobs of this user, or raise the quota"));
  }
  if (origin != nullptr) {
    if (absl::Status taken = origin->Take(bytes); !taken.ok()) return taken;
  }
  if (bytes > 0) held_[user] = held + bytes;
  return absl::OkStatus();
}

std::vector<std::pair<Tenant, std::uint64_t>> ArenaQuota::Users() const {
  MutexLock lock(&mutex_);
  return {held_.begin(), held_.end()};
}

std::uint64_t ArenaQuota::total_bytes() const {
  MutexLock lock(&mutex_);
  std::uint64_t total = 0;
  for (const auto& [user, bytes] : held_) total += bytes;
  return total;
}

std::uint64_t ArenaQuota::bytes_of(const Tenant& user) const {
  MutexLock lock(&mutex_);
  const auto found = held_.find(user);
  return found == held_.end() ? 0 : found->second;
}

void ArenaQuota::Release(const Tenant& user, std::uint64_t bytes, MemoryOrigin* origin) {
  if (origin != nullptr) origin->GiveBack(bytes);
  MutexLock lock(&mutex_);
  const auto found = held_.find(user);
  assert(found != held_.end() && found->second >= bytes);
  found->second -= bytes;
  if (found->second == 0) held_.erase(found);
}

ArenaQuota::Reservation::Reservation(Reservation&& other) noexcept
    : quota_(std::exchange(other.quota_, nullptr)),
      user_(other.user_),
      bytes_(std::exchange(other.bytes_, 0)),
      origin_(std::move(other.origin_)) {}

ArenaQuota::Reservation& ArenaQuota::Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  Release();
  quota_ = std::exchange(other.quota_, nullptr);
  user_ = other.user_;
  bytes_ = std::exchange(other.bytes_, 0);
  origin_ = std::move(other.origin_);
  return *this;
}

ArenaQuota::Reservation::~Reservation() { Release(); }

absl::Status ArenaQuota::Reservation::Resize(std::uint64_t bytes) {
  if (quota_ == nullptr) return absl::OkStatus();
  if (bytes > bytes_) {
    absl::Status taken = quota_->Take(user_, bytes - bytes_, origin_.get());
    if (!taken.ok()) return taken;
  } else if (bytes < bytes_) {
    quota_->Release(user_, bytes_ - bytes, origin_.get());
  }
  bytes_ = bytes;
  return absl::OkStatus();
}

void ArenaQuota::Reservation::LeaveOrigin() {
  if (origin_ != nullptr) origin_->GiveBack(bytes_);
  origin_ = nullptr;
}

ArenaQuota::Reservation ArenaQuota::Reservation::Split(std::uint64_t bytes) {
  const std::uint64_t moved = std::min(bytes, bytes_);
  bytes_ -= moved;
  return Reservation(quota_, user_, moved, origin_);
}

void ArenaQuota::Reservation::Release() {
  if (quota_ != nullptr && bytes_ > 0) quota_->Release(user_, bytes_, origin_.get());
  quota_ = nullptr;
  bytes_ = 0;
  origin_ = nullptr;
}

}  // namespace gradsync::daemon
