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

// For so long a thread that gRPC needs is tried again.
constexpr std::uint64_t kGrpcWaitsNs = 1'000'000'000;

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

}  // namespace

MayBeRefused::MayBeRefused() : before_(may_be_refused) { may_be_refused = true; }
MayBeRefused::~MayBeRefused() { may_be_refused = before_; }

void LeaveNoThreadsToGrpc() { has_grpc.store(false); }

bool CanStartThreads(int count) {
  // Two attempts at once would take each other's threads.
  static Mutex mutex;
  static std::uint64_t refused_ns = 0;  // guarded by it; 0: never
  const MutexLock lock(&mutex);
  if (refused_ns != 0 && MonotonicNowNs() < refused_ns + kRefusedNs) return false;
  const bool can = TryToStart(count + (has_grpc.load() ? kThreadsLeftToGrpc : 0));
  refused_ns = can ? 0 : MonotonicNowNs();
  return can;
}

absl::StatusOr<std::thread> StartThread(std::function<void()> body) {
  if (has_grpc.load() && !CanStartThreads(1)) return OutOfThreads();
  return StartCountedThread(std::move(body));
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
  for (;;) {
    const int error = start(thread, attributes, body, argument);
    if (error != EAGAIN || gradsync::daemon::may_be_refused || MonotonicNowNs() > give_up_ns) {
      return error;
    }
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
