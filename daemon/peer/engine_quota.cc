#include "daemon/peer/engine_quota.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

// One engine that is counted.
struct EngineQuota::Held {
  Held(std::shared_ptr<State> the_state, const Tenant& the_user, ArenaQuota::Reservation the_charge)
      : state(std::move(the_state)), user(the_user), charge(std::move(the_charge)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    MutexLock lock(&state->mutex);
    const auto found = state->held.find(user);
    if (--found->second == 0) state->held.erase(found);
    --state->all;
  }

  const std::shared_ptr<State> state;
  const Tenant user;
  const ArenaQuota::Reservation charge;
};

absl::StatusOr<std::shared_ptr<void>> EngineQuota::Take(const Tenant& user, std::uint64_t bytes) {
  auto charge = MemoryAccount{memory_, user}.Reserve(bytes);
  if (!charge.ok()) return charge.status();
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
  return std::make_shared<Held>(state_, user, *std::move(charge));
}

}  // namespace gradsync::daemon
