#include "daemon/peer/address_jobs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

absl::StatusOr<std::shared_ptr<void>> AddressJobs::Add(const std::string& address,
                                                       const JobKey& key, std::uint64_t bytes) {
  {
    MutexLock lock(&state_->mutex);
    const auto found = state_->addresses.find(address);
    const bool known = found != state_->addresses.end();
    const std::uint64_t held = known ? found->second.bytes : 0;
    std::uint64_t before = 0;
    if (known) {
      const auto job = found->second.jobs.find(key);
      if (job != found->second.jobs.end()) before = job->second.bytes;
    }
    const std::uint64_t more = std::max(bytes, before) - before;
    if (more > kMostBytes - held) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, reason::kQuota,
          absl::StrCat("the nodes of ", address, " have joined jobs of ", held,
                       " bytes here and join another one of ", bytes, "; ", kMostBytes, " allowed"),
          {{field::kJob, key.job_id}, {field::kAddress, address}});
    }
    Address& counted = state_->addresses[address];
    counted.bytes += more;
    Entry& entry = counted.jobs[key];
    entry.bytes = before + more;
    ++entry.holders;
  }
  // Not null: the pointer says that one is held.
  return std::shared_ptr<void>(this, [state = state_, address, key](void*) {
    MutexLock lock(&state->mutex);
    const auto found = state->addresses.find(address);
    const auto job = found->second.jobs.find(key);
    if (--job->second.holders > 0) return;
    found->second.bytes -= job->second.bytes;
    found->second.jobs.erase(job);
    if (found->second.jobs.empty()) state->addresses.erase(found);
  });
}

std::uint64_t AddressJobs::BytesOf(const std::string& address) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->addresses.find(address);
  return found == state_->addresses.end() ? 0 : found->second.bytes;
}

}  // namespace gradsync::daemon
