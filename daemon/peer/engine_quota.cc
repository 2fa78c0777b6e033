#include "daemon/peer/engine_quota.h"

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

absl::StatusOr<std::shared_ptr<void>> EngineQuota::Take(const Tenant& user) {
  {
    MutexLock lock(&state_->mutex);
    const auto found = state_->held.find(user);
    const std::size_t held = found == state_->held.end() ? 0 : found->second;
    if (held >= per_user_ || state_->all >= total()) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, reason::kQuota,
          held >= per_user_
              ? absl::StrCat("user ", user.Text(), " has ", held,
                             " engines between nodes, as many as ",
                             "quota_jobs_per_user allows: end other jobs, or raise it")
              : absl::StrCat("the daemon has ", state_->all, " engines between nodes, as many as ",
                             "quota_jobs_per_user allows for all users: end jobs, or raise it"));
    }
    state_->held[user] = held + 1;
    ++state_->all;
  }
  // Not null: the pointer says that one is held.
  return std::shared_ptr<void>(this, [state = state_, user](void*) {
    MutexLock lock(&state->mutex);
    const auto found = state->held.find(user);
    if (--found->second == 0) state->held.erase(found);
    --state->all;
  });
}

}  // namespace gradsync::daemon
