// Limits the file descriptors that the daemon has open for each user.

#ifndef DAEMON_SESSION_DESCRIPTOR_QUOTA_H_
#define DAEMON_SESSION_DESCRIPTOR_QUOTA_H_

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// Thread-safe. Its results may outlive it.
class DescriptorQuota {
 public:
  explicit DescriptorQuota(std::size_t per_user);
  // The limit of descriptors that the process should have: its hard limit, but less than the number
  // of mappings that Linux allows it (vm.max_map_count). Each mapping of memory that is shared with
  // trainers has a descriptor. So some mappings are left for threads and for the allocators, which
  // end the process if they get none.
  static std::size_t LimitOfProcess(std::size_t hard_limit, std::size_t max_map_count);
  // The process's limit of descriptors, less those that the daemon needs itself, divided by two. So
  // one user, whatever it opens, leaves the other half to others.
  static std::size_t PerUserOfProcess();

  // Counts them while the result exists: the caller keeps it as long as they are open.
  // RESOURCE_EXHAUSTED: the user would have too many, or few are left.
  absl::StatusOr<std::shared_ptr<void>> Take(const Tenant& user, std::size_t descriptors);
  // The same for a connection that the accept loop has accepted, also when few are left.
  absl::StatusOr<std::shared_ptr<void>> TakeForConnection(const Tenant& user,
                                                          std::size_t descriptors);
  // Few descriptors are left, and those that become free belong to the reserve of the accept loop.
  void SetScarce(bool scarce) { scarce_.store(scarce); }
  bool scarce() const { return scarce_.load(); }
  std::size_t per_user() const { return per_user_; }
  std::size_t Of(const Tenant& user) const;

 private:
  struct State {
    mutable Mutex mutex;
    std::map<Tenant, std::size_t> held ABSL_GUARDED_BY(mutex);  // only users that hold some
  };
  const std::size_t per_user_;
  std::atomic<bool> scarce_{false};
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::daemon

#endif  // DAEMON_SESSION_DESCRIPTOR_QUOTA_H_
