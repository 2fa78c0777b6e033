#include "client/src/open_step.h"

#include <algorithm>

namespace gradsync::client {

void OpenStep::Mark(std::size_t bucket) {
  marked_[bucket] = true;
  ++marks_;
}

void OpenStep::MarkUnused(std::size_t parameter) {
  if (unused_.empty()) unused_.resize(parameters_);
  unused_[parameter] = true;
  ++unused_count_;
}

std::vector<std::size_t> OpenStep::unmarked() const {
  std::vector<std::size_t> buckets;
  buckets.reserve(marked_.size() - marks_);
  for (std::size_t i = 0; i < marked_.size(); ++i) {
    if (!marked_[i]) buckets.push_back(i);
  }
  return buckets;
}

std::vector<bool> OpenStep::Used(const std::vector<bool>& used) const {
  if (unused_count_ == 0) return used;
  std::vector<bool> result = used;
  if (result.empty()) result.assign(parameters_, true);
  for (std::size_t i = 0; i < parameters_; ++i) {
    if (unused_[i]) result[i] = false;
  }
  return result;
}

std::vector<HeldGradient> OpenStep::TakeHeld(const std::vector<bool>& used_by_some) {
  const auto used = [&](const HeldGradient& gradient) {
    return used_by_some.empty() || used_by_some[gradient.parameter];
  };
  held_.erase(std::remove_if(held_.begin(), held_.end(), used), held_.end());
  return std::move(held_);
}

}  // namespace gradsync::client
