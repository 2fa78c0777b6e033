#include "daemon/rpc/descriptor_reserve.h"

#include <sys/eventfd.h>

#include <utility>

namespace gradsync::daemon {

DescriptorReserve::DescriptorReserve(std::size_t count, DescriptorQuota* quota)
    : count_(count), quota_(quota) {
  Refill();
}

bool DescriptorReserve::Free(std::size_t count) {
  if (held_.size() < count) return false;
  if (quota_ != nullptr) quota_->SetScarce(true);  // before others see them
  held_.resize(held_.size() - count);
  return true;
}

void DescriptorReserve::Refill() {
  if (full()) return;
  while (held_.size() < count_) {
    UniqueFd one(eventfd(0, EFD_CLOEXEC));
    if (!one.valid()) return;
    held_.push_back(std::move(one));
  }
  if (quota_ != nullptr) quota_->SetScarce(false);
}

}  // namespace gradsync::daemon
