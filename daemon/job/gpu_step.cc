#include "daemon/job/gpu_step.h"

#include <utility>

namespace gradsync::daemon {

void GpuVerdict::Add(const ReduceOperation& operation) {
  if (operation.device().is_void) {
    state_ = State::kVoid;
  } else if (state_ == State::kGood && !operation.failure.ok()) {
    state_ = State::kInDoubt;
    doubt_ = operation.failure;
  }
}

void EarlyMessages::HandleAll(const Membership& members, std::uint64_t now_ns,
                              DeferredActions* actions) {
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    for (const Message& message : std::exchange(ranks_[rank], Rank()).messages) {
      absl::Status status = message(now_ns, actions);
      if (status.ok()) continue;
      actions->breaches.emplace_back(members.SessionOf(rank), std::move(status));
      break;
    }
  }
}

}  // namespace gradsync::daemon
