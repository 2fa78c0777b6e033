#include "daemon/rpc/stream_count.h"

namespace gradsync::daemon {

std::shared_ptr<void> StreamCount::Add() {
  {
    MutexLock lock(&state_->mutex);
    ++state_->count;
  }
  return std::shared_ptr<void>(nullptr, [state = state_](void*) {
    MutexLock lock(&state->mutex);
    if (--state->count == 0) state->none.NotifyAll();
  });
}

std::size_t StreamCount::Get() const {
  MutexLock lock(&state_->mutex);
  return state_->count;
}

bool StreamCount::WaitForNone(std::chrono::steady_clock::time_point deadline) const {
  MutexLock lock(&state_->mutex);
  while (state_->count > 0) {
    if (!state_->none.WaitUntil(&state_->mutex, deadline)) return state_->count == 0;
  }
  return true;
}

}  // namespace gradsync::daemon
