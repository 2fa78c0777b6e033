// Shares the CPUs among the engine processes by user, and then by job.

#ifndef DAEMON_WORKER_ENGINE_PRIORITIES_H_
#define DAEMON_WORKER_ENGINE_PRIORITIES_H_

#include <cstddef>
#include <functional>
#include <list>
#include <map>

#include "absl/base/thread_annotations.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// The kernel shares the CPUs by thread, so a user with many engines would get more than others. So
// if a user has k engines here, the kernel gives each of them the weight 1/k. A user with one
// engine has the daemon's own priority.
//
// Thread-safe. Outlives its members.
class EnginePriorities {
 public:
  // Sets the nice value of a process. It need not succeed: without the right to lower a nice value
  // (RLIMIT_NICE, CAP_SYS_NICE) an engine keeps its value when another engine of its user ends.
  using SetNice = std::function<void(int nice)>;

  // An engine of a user, from the constructor to the destructor.
  class Member {
   public:
    // Null `priorities`: does nothing. `set` is called at once, and when the number of the user's
    // engines changes, on any thread, until the destructor returns. It must not create or destroy
    // a member.
    Member(EnginePriorities* priorities, const Tenant& user, SetNice set);
    ~Member();
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

   private:
    EnginePriorities* const priorities_;
    const Tenant user_;
    std::list<SetNice>::iterator at_;  // unless priorities_ is null
  };

  // The daemon's own nice value is that of the calling thread.
  EnginePriorities();
  explicit EnginePriorities(int daemon_nice) : daemon_nice_(daemon_nice) {}
  EnginePriorities(const EnginePriorities&) = delete;
  EnginePriorities& operator=(const EnginePriorities&) = delete;

 private:
  int NiceOf(std::size_t engines) const;
  void SetAll(const std::list<SetNice>& engines) const;

  const int daemon_nice_;
  Mutex mutex_;
  std::map<Tenant, std::list<SetNice>> engines_ ABSL_GUARDED_BY(mutex_);  // no list is empty
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_ENGINE_PRIORITIES_H_
