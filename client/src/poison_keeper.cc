#include "client/src/poison_keeper.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "absl/time/time.h"
#include "client/src/done_wait.h"

namespace gradsync::client {
namespace {

constexpr absl::Duration kFirstLook = absl::Milliseconds(1);
constexpr absl::Duration kLastLooks = absl::Milliseconds(100);

}  // namespace

PoisonKeeper::PoisonKeeper(BucketSemaphore* words, std::size_t count, std::uint64_t step)
    : words_(words), count_(count), step_(step) {
  Poison();
  // This thread takes none of the trainer's signals.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { Keep(); });
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

PoisonKeeper::~PoisonKeeper() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void PoisonKeeper::Keep() {
  pthread_setname_np(pthread_self(), "gradsync");
  absl::Duration look = kFirstLook;
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&ending_), look)) {
    Poison();
    look = std::min(look * 1.1, kLastLooks);
  }
}

void PoisonKeeper::Poison() const {
  for (std::size_t i = 0; i < count_; ++i) {
    if (SemaphorePoisoned(words_[i].done.load(std::memory_order_relaxed))) continue;
    PoisonDone(&words_[i].done, step_);
  }
}

}  // namespace gradsync::client
