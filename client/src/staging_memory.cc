#include "client/src/staging_memory.h"

namespace gradsync::client {

bool StagingMemory::Acquire(absl::Time deadline, const std::atomic<bool>* cancelled) {
  const auto settled = [this, cancelled]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !used_ || (cancelled != nullptr && cancelled->load());
  };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithDeadline(absl::Condition(&settled), deadline);
  if (used_ || (cancelled != nullptr && cancelled->load())) return false;
  used_ = true;
  return true;
}

void StagingMemory::Release() {
  absl::MutexLock lock(&mutex_);
  used_ = false;
}

absl::Status StagingMemory::Populate() {
  absl::MutexLock lock(&populate_mutex_);
  if (populated_) return absl::OkStatus();
  if (auto status = memory_->PopulateAndSeal(memfd_.get()); !status.ok()) return status;
  memfd_ = FileDescriptor();
  populated_ = true;
  return absl::OkStatus();
}

}  // namespace gradsync::client
