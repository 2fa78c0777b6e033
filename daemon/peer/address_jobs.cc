#include "daemon/peer/address_jobs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

absl::StatusOr<std::shared_ptr<void>> AddressJobs::Add(const std::string& address,
                                                       const std::string& network,
                                                       const JobKey& key, std::uint64_t bytes) {
  {
    MutexLock lock(&state_->mutex);
    absl::Status checked = state_->CheckLocked(address, key, bytes, kMostBytes);
    if (checked.ok()) checked = state_->CheckLocked(network, key, bytes, kMostBytesOfNetwork);
    if (!checked.ok()) return checked;
    state_->AddLocked(address, key, bytes);
    state_->AddLocked(network, key, bytes);
  }
  // Not null: the pointer says that one is held.
  return std::shared_ptr<void>(this, [state = state_, address, network, key](void*) {
    MutexLock lock(&state->mutex);
    state->RemoveLocked(address, key);
    state->RemoveLocked(network, key);
  });
}

absl::Status AddressJobs::State::CheckLocked(const std::string& address, const JobKey& key,
                                             std::uint64_t bytes, std::uint64_t most) const {
  const auto found = addresses.find(address);
  const bool known = found != addresses.end();
  const std::uint64_t held = known ? found->second.bytes : 0;
  std::uint64_t before = 0;
  if (known) {
    const auto job = found->second.jobs.find(key);
    if (job != found->second.jobs.end()) before = job->second.bytes;
  }
  if (std::max(bytes, before) - before <= most - held) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kResourceExhausted, reason::kQuota,
      absl::StrCat("the nodes of ", address, " have joined jobs of ", held,
                   " bytes here and join another one of ", bytes, "; ", most, " allowed"),
      {{field::kJob, key.job_id}, {field::kAddress, address}});
}

void AddressJobs::State::AddLocked(const std::string& address, const JobKey& key,
                                   std::uint64_t bytes) {
  Address& counted = addresses[address];
  Entry& entry = counted.jobs[key];
  const std::uint64_t more = std::max(bytes, entry.bytes) - entry.bytes;
  counted.bytes += more;
  entry.bytes += more;
  ++entry.holders;
}

void AddressJobs::State::RemoveLocked(const std::string& address, const JobKey& key) {
  const auto found = addresses.find(address);
  const auto job = found->second.jobs.find(key);
  if (--job->second.holders > 0) return;
  found->second.bytes -= job->second.bytes;
  found->second.jobs.erase(job);
  if (found->second.jobs.empty()) addresses.erase(found);
}

std::uint64_t AddressJobs::BytesOf(const std::string& address) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->addresses.find(address);
  return found == state_->addresses.end() ? 0 : found->second.bytes;
}

}  // namespace gradsync::daemon
