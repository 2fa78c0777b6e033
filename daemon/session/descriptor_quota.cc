#include "daemon/session/descriptor_quota.h"

#include <sys/resource.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

// The daemon's own: sockets, epoll, gRPC's, pipes of workers; and what it keeps for clients that
// ask.
constexpr std::size_t kDaemonsOwn = 256;
// One mapping in so many is the daemon's own: 8,191 of Linux's default. An idle daemon has some
// 400, and two for each thread.
constexpr std::size_t kDaemonsMappings = 8;
// How a refusal ends.
constexpr char kRaise[] =
    "close connections or sessions, or raise the daemon's limit of descriptors (LimitNOFILE=, and "
    "vm.max_map_count, which must be larger)";

}  // namespace

DescriptorQuota::DescriptorQuota(std::size_t per_user) : per_user_(per_user) {}

std::size_t DescriptorQuota::LimitOfProcess(std::size_t hard_limit, std::size_t max_map_count) {
  return std::min(hard_limit, max_map_count - max_map_count / kDaemonsMappings);
}

std::size_t DescriptorQuota::PerUserOfProcess() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const auto all = static_cast<std::size_t>(limit.rlim_cur);
  return (all - std::min(all / 2, kDaemonsOwn)) / 2;
}

absl::StatusOr<std::shared_ptr<void>> DescriptorQuota::Take(const Tenant& user,
                                                            std::size_t descriptors) {
  if (scarce()) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                     absl::StrCat("the daemon has few file descriptors left: ", kRaise));
  }
  return TakeForConnection(user, descriptors);
}

absl::StatusOr<std::shared_ptr<void>> DescriptorQuota::TakeForConnection(const Tenant& user,
                                                                         std::size_t descriptors) {
  {
    MutexLock lock(&state_->mutex);
    const auto found = state_->held.find(user);
    const std::size_t held = found == state_->held.end() ? 0 : found->second;
    if (held + descriptors > per_user_) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, reason::kQuota,
          absl::StrCat("the daemon has ", held, " file descriptors open for user ", user.Text(),
                       ", of ", per_user_, " that a user may have: ", kRaise));
    }
    state_->held[user] = held + descriptors;
  }
  // Not null: the pointer says that they are held.
  return std::shared_ptr<void>(this, [state = state_, user, descriptors](void*) {
    MutexLock lock(&state->mutex);
    const auto found = state->held.find(user);
    found->second -= descriptors;
    if (found->second == 0) state->held.erase(found);
  });
}

std::size_t DescriptorQuota::Of(const Tenant& user) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->held.find(user);
  return found == state_->held.end() ? 0 : found->second;
}

}  // namespace gradsync::daemon
