// Shares the CPUs among the engine processes by user, and then by job.

#ifndef DAEMON_WORKER_ENGINE_PRIORITIES_H_
#define DAEMON_WORKER_ENGINE_PRIORITIES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// The kernel shares the CPUs by thread, so a user with many engines would get more than others.
// While k engines of a user work, the kernel gives each of them about the weight 1/k, by its nice
// value. A user with one engine that works has the daemon's own priority.
//
// Thread-safe. Outlives its engines.
class EnginePriorities {
 public:
  // Sets the nice value of a process. It may fail: without the right to lower a nice value
  // (RLIMIT_NICE, CAP_SYS_NICE) an engine keeps its value when others of its user rest.
  using SetNice = std::function<void(int nice)>;

  // An engine that has had no work for this long rests.
  static constexpr std::uint64_t kRestNs = 10'000'000'000;
  // How often a working engine looks whether others rest.
  static constexpr std::uint64_t kLookNs = 1'000'000'000;

  // An engine of a user. It rests at first.
  class Engine {
   public:
    // Null `priorities`: `set` is not called. Otherwise it is called on any thread, until the
    // destructor returns. It must not call this class.
    Engine(EnginePriorities* priorities, const Tenant& user, SetNice set);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // The engine gets work. Takes a lock if the engine rests, else at most once in kLookNs.
    void Work();

   private:
    friend class EnginePriorities;
    EnginePriorities* const priorities_;
    const Tenant user_;
    const SetNice set_;
    std::atomic<std::uint64_t> worked_ns_{0};  // last; 0: never
    std::atomic<std::uint64_t> look_ns_{0};    // when Work() looks next; 0: it rests
    int nice_ = 0;                             // guarded by the mutex of priorities_
  };

  // The daemon's own nice value is that of the calling thread.
  EnginePriorities();
  // `clock`: may be null; then it is MonotonicNowNs().
  EnginePriorities(int daemon_nice, const Clock* clock);
  EnginePriorities(const EnginePriorities&) = delete;
  EnginePriorities& operator=(const EnginePriorities&) = delete;

 private:
  // Gives each engine of the user that works its share.
  void Look(const std::vector<Engine*>& engines) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::uint64_t NowNs() const { return clock_ == nullptr ? MonotonicNowNs() : clock_->NowNs(); }

  const int daemon_nice_;
  const Clock* const clock_;
  Mutex mutex_;
  std::map<Tenant, std::vector<Engine*>> engines_ ABSL_GUARDED_BY(mutex_);  // none is empty
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_ENGINE_PRIORITIES_H_
