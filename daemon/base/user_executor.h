// Runs work for users of the node on threads of its own: work that takes too long for gRPC's
// threads.

#ifndef DAEMON_BASE_USER_EXECUTOR_H_
#define DAEMON_BASE_USER_EXECUTOR_H_

#include <functional>
#include <utility>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// Thread-safe. Tests use one that runs its work when they say so.
class UserExecutor {
 public:
  virtual ~UserExecutor() = default;
  // Runs `work` later, never within this call. A user's work runs in the order of the calls.
  virtual void Run(const Tenant& user, std::function<void()> work) = 0;
};

// One user's queue on an executor. A value.
struct UserQueue {
  UserExecutor* executor = nullptr;
  Tenant user;

  // As UserExecutor::Run().
  void Run(std::function<void()> work) const { executor->Run(user, std::move(work)); }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_USER_EXECUTOR_H_
