#include "tests/job/held_reducer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace gradsync::daemon {
namespace {

template <typename T>
GradientStats CombineAll(const ReduceOperation& operation) {
  GradientStats stats;
  std::vector<T> elements(operation.host().buffers.size());
  for (std::size_t i = 0; i < operation.count; ++i) {
    for (std::size_t k = 0; k < elements.size(); ++k) {
      elements[k] = reinterpret_cast<const T*>(operation.host().buffers[k])[i];
    }
    const T combined = HeldReducer::Combined(elements, operation.scale);
    for (std::byte* buffer : operation.host().buffers) reinterpret_cast<T*>(buffer)[i] = combined;
    stats.sum_of_squares += static_cast<double>(combined) * static_cast<double>(combined);
    if (!std::isfinite(static_cast<double>(combined))) ++stats.non_finite;
  }
  return stats;
}

}  // namespace

void HeldReducer::Reduce(ReduceOperation* operation) {
  ++submitted_;
  held_.push_back(operation);
  if (at_once_) Complete(operation);
}

bool HeldReducer::Touches(const std::byte* data, std::size_t bytes) const {
  for (const ReduceOperation* operation : held_) {
    const std::size_t length = operation->count * ItemSize(operation->dtype);
    for (const std::byte* buffer : operation->host().buffers) {
      if (buffer < data + bytes && data < buffer + length) return true;
    }
  }
  return false;
}

void HeldReducer::Release(ReduceOperation* operation) {
  const auto found = std::find(held_.begin(), held_.end(), operation);
  if (found == held_.end()) std::abort();  // an error in the test
  held_.erase(found);
}

void HeldReducer::Complete(ReduceOperation* operation) {
  const std::uint64_t start_ns = clock_->NowNs();
  const GradientStats stats =
      operation->dtype == DataType::kFloat64 ? CombineAll<double>(*operation)
      : operation->dtype == DataType::kUint8 ? CombineAll<std::uint8_t>(*operation)
                                             : CombineAll<float>(*operation);
  if (operation->measure) operation->stats = stats;
  Release(operation);
  operation->done({start_ns, clock_->NowNs()});
}

void HeldReducer::Fail(ReduceOperation* operation, const absl::Status& why) {
  Release(operation);
  operation->failure = why;
  operation->done({clock_->NowNs(), clock_->NowNs()});
}

void HeldReducer::CompleteAll() {
  while (!held_.empty()) Complete(held_.front());
}

}  // namespace gradsync::daemon
