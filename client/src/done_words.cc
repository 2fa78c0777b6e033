#include "client/src/done_words.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/time/clock.h"

namespace gradsync::client {
namespace {

// How often a wait looks at a word that a GPU writes: a GPU wakes no futex.
constexpr absl::Duration kDeviceWordPeriod = absl::Microseconds(200);

}  // namespace

DoneWords::DoneWords(std::shared_ptr<MappedMemory> semaphores, std::size_t count, bool on_device)
    : semaphores_(std::move(semaphores)), count_(count), on_device_(on_device) {}

DoneWait DoneWords::Await(std::size_t bucket, std::uint64_t step, absl::Time deadline,
                          DaemonSilence* silence) const {
  for (;;) {
    absl::Duration slice = std::min(deadline - absl::Now(), silence->slice());
    if (on_device_) slice = std::min(slice, kDeviceWordPeriod);
    const DoneWait wait = WaitDone(semaphores()[bucket].done, step, slice, &sleepers_);
    if (wait != DoneWait::kTimedOut || absl::Now() >= deadline) return wait;
    if (silence->Look()) return DoneWait::kSilent;
  }
}

bool DoneWords::Released(std::size_t bucket, std::uint64_t step) const {
  return SemaphoreReleased(semaphores()[bucket].done.load(std::memory_order_acquire), step);
}

std::uint64_t DoneWords::LastVoid() const {
  return header().void_step.load(std::memory_order_acquire);
}

void DoneWords::Poison(std::uint64_t step) {
  for (std::size_t i = 0; i < count_; ++i) PoisonDone(&semaphores()[i].done, step);
  if (on_device_) KeepPoisoned(step);
}

void DoneWords::KeepPoisoned(std::uint64_t step) {
  absl::MutexLock lock(&mutex_);
  if (ended_ || keeper_ != nullptr) return;
  keeper_ = std::make_unique<PoisonKeeper>(semaphores(), count_, step);
}

void DoneWords::EndPoison() {
  std::unique_ptr<PoisonKeeper> keeper;  // ends its thread after the lock is released
  absl::MutexLock lock(&mutex_);
  ended_ = true;
  keeper.swap(keeper_);
}

}  // namespace gradsync::client
