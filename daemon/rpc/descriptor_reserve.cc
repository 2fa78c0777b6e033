#include "daemon/rpc/descriptor_reserve.h"

#include <sys/eventfd.h>

#include <utility>

namespace gradsync::daemon {

DescriptorReserve::DescriptorReserve(std::size_t count) : count_(count) { Refill(); }

bool DescriptorReserve::Free(std::size_t count) {
  if (held_.size() < count) return false;
  held_.resize(held_.size() - count);
  return true;
}

void DescriptorReserve::Refill() {
  while (held_.size() < count_) {
    UniqueFd one(eventfd(0, EFD_CLOEXEC));
    if (!one.valid()) return;
    held_.push_back(std::move(one));
  }
}

}  // namespace gradsync::daemon
