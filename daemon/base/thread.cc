#include "daemon/base/thread.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <system_error>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {
namespace {

std::atomic<bool> has_grpc{true};

// After a refusal the answer is no for so long. The next attempt takes gRPC's threads again.
constexpr std::uint64_t kRefusedNs = 100'000'000;

// A thread that gRPC needs is tried for at least so long, and at least so often. The whole machine
// may stop for a while.
constexpr std::uint64_t kGrpcWaitsNs = 1'000'000'000;
constexpr int kGrpcTries = 500;

// True while this thread starts a thread that the daemon can do without.
thread_local bool may_be_refused = false;

// Starts so many threads and ends them. False: the system refuses one.
bool TryToStart(int count) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  threads.reserve(count);
  bool can = true;
  try {
    const MayBeRefused refusal;
    for (int i = 0; i < count; ++i) threads.emplace_back([ended] { ended.wait(); });
  } catch (const std::system_error&) {
    can = false;
  }
  end.set_value();
  for (std::thread& thread : threads) thread.join();
  return can;
}

// The threads that are started on request. Thread-safe.
class Starts {
 public:
  static Starts& OfProcess() {
    static auto* const starts = new Starts;  // for threads that outlive main
    return *starts;
  }
  bool Can(int count) {
    const MutexLock lock(&mutex_);
    return CanLocked(count);
  }
  bool Start(int count, absl::FunctionRef<void()> start) {
    const MutexLock lock(&mutex_);
    if (!CanLocked(count)) return false;
    start();
    return true;
  }
  absl::Status Start(std::vector<std::function<void()>> bodies, std::vector<std::thread>* threads) {
    const MutexLock lock(&mutex_);
    if (has_grpc.load() && !CanLocked(static_cast<int>(bodies.size()))) return OutOfThreads();
    for (std::function<void()>& body : bodies) {
      auto thread = StartCountedThread(std::move(body));
      if (!thread.ok()) return thread.status();
      threads->push_back(*std::move(thread));
    }
    return absl::OkStatus();
  }

 private:
  bool CanLocked(int count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (refused_ns_ != 0 && MonotonicNowNs() < refused_ns_ + kRefusedNs) return false;
    const bool can = TryToStart(count + (has_grpc.load() ? kThreadsLeftToGrpc : 0));
    refused_ns_ = can ? 0 : MonotonicNowNs();
    return can;
  }

  // Held until the threads have started: two attempts at once would take each other's threads.
  Mutex mutex_;
  std::uint64_t refused_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: never
};

}  // namespace

MayBeRefused::MayBeRefused() : before_(may_be_refused) { may_be_refused = true; }
MayBeRefused::~MayBeRefused() { may_be_refused = before_; }

void LeaveNoThreadsToGrpc() { has_grpc.store(false); }

bool StartWhatIsCounted(int count, absl::FunctionRef<void()> start) {
  return Starts::OfProcess().Start(count, start);
}

bool CanStartThreads(int count) { return Starts::OfProcess().Can(count); }

absl::StatusOr<std::thread> StartThread(std::function<void()> body) {
  std::vector<std::function<void()>> bodies;
  bodies.push_back(std::move(body));
  std::vector<std::thread> threads;
  absl::Status started = StartThreads(std::move(bodies), &threads);
  if (!started.ok()) return started;
  return std::move(threads.front());
}

absl::Status StartThreads(std::vector<std::function<void()>> bodies,
                          std::vector<std::thread>* threads) {
  return Starts::OfProcess().Start(std::move(bodies), threads);
}

absl::StatusOr<std::thread> StartCountedThread(std::function<void()> body) {
  try {
    const MayBeRefused refusal;
    return std::thread(std::move(body));
  } catch (const std::system_error&) {
    return OutOfThreads();
  }
}

absl::Status OutOfThreads() {
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                   "no thread could be started: raise the daemon's limit of threads (TasksMax=), "
                   "or the limit of processes of its container or user");
}

}  // namespace gradsync::daemon

// Clang's AddressSanitizer has a function of its own, which must be called.
#if defined(__clang__) && defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GRADSYNC_SANITIZER_STARTS_THREADS
#endif
#endif

#ifndef GRADSYNC_SANITIZER_STARTS_THREADS
extern "C" int GradsyncStartThread(pthread_t* thread, const pthread_attr_t* attributes,
                                   void* (*body)(void*), void* argument) noexcept {
  using gradsync::daemon::MonotonicNowNs;
  static const auto start =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  const std::uint64_t give_up_ns = MonotonicNowNs() + gradsync::daemon::kGrpcWaitsNs;
  for (int tries = 1;; ++tries) {
    const int error = start(thread, attributes, body, argument);
    const bool gives_up = tries >= gradsync::daemon::kGrpcTries && MonotonicNowNs() > give_up_ns;
    if (error != EAGAIN || gradsync::daemon::may_be_refused || gives_up) return error;
    // The system does not tell when a thread has ended.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Stands before the C library's function, for gRPC and every other library. gRPC loses work if it
// gets no thread, and TryToStart() takes the last ones for a moment. So what the system refuses is
// tried again.
extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept
    __attribute__((alias("GradsyncStartThread")));
#endif
