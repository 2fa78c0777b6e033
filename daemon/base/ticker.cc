#include "daemon/base/ticker.h"

#include <utility>

namespace gradsync::daemon {

Ticker::Ticker(std::chrono::milliseconds period, std::function<bool()> tick)
    : period_(period), tick_(std::move(tick)), thread_([this] { Loop(); }) {}

void Ticker::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Ticker::Wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(active_, true)) return;
  }
  changed_.notify_all();
}

void Ticker::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (!active_) {
      changed_.wait(lock);
      continue;
    }
    if (changed_.wait_for(lock, period_, [this] { return stopping_; })) return;
    active_ = false;
    lock.unlock();
    const bool more = tick_();
    lock.lock();
    active_ = active_ || more;
  }
}

}  // namespace gradsync::daemon
