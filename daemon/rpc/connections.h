// The connections to the gRPC socket: finds the process behind "fd:N", gRPC's name of a caller.
//
// gRPC owns a connection's descriptor, and chooses when to close it. The kernel may then reuse the
// number for the next connection. Two things keep the daemon from mistaking one user's call for
// another's: numbers are used in rotation, so one is reused only after hundreds of connections, and
// an entry is removed as soon as the client closes its end.

#ifndef DAEMON_RPC_CONNECTIONS_H_
#define DAEMON_RPC_CONNECTIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/rpc/client_input.h"
#include "daemon/session/client_process.h"
#include "daemon/session/descriptor_quota.h"

namespace gradsync::daemon {

// Every user's open connections: admits them, counts them and their descriptors for their users,
// and names the process behind each. Owns no descriptor. Thread-safe.
class Connections {
 public:
  // The most open connections of one user. Sessions have a quota of their own.
  static constexpr std::size_t kPerUser = 1024;
  // Descriptors of a connection: the accepted one, gRPC's copy and the process's pidfd.
  static constexpr std::size_t kDescriptors = 3;

  // Users whose refused connections are counted. With more, those without a connection are
  // forgotten.
  static constexpr std::size_t kMostRefusedUsers = 1024;

  struct Usage {
    std::size_t open = 0;
    std::uint64_t refused = 0;  // since the daemon started
  };

  // `quota` outlives it.
  explicit Connections(DescriptorQuota* quota);

  struct Admitted {
    UniqueFd for_grpc;            // the caller releases it to gRPC
    std::shared_ptr<void> quota;  // to hold until gRPC has closed the descriptor
    std::uint64_t id = 0;
    std::shared_ptr<ClientInput> input;  // not null
  };
  // Adds a connection. RESOURCE_EXHAUSTED: the user has too many connections or descriptors, or the
  // daemon has no descriptor left.
  absl::StatusOr<Admitted> Admit(const UniqueFd& accepted, const ClientProcess& process);
  void Remove(std::uint64_t id);
  // Counts other descriptors for the user, as long as the result exists. RESOURCE_EXHAUSTED: the
  // user has too many.
  absl::StatusOr<std::shared_ptr<void>> TakeDescriptors(const Tenant& user, std::size_t count) {
    return quota_->TakeForConnection(user, count);
  }
  DescriptorQuota* quota() const { return quota_; }
  // True if the user may have no more connections.
  bool IsFull(const Tenant& user) const;
  // The open connections of a user.
  std::size_t Count(const Tenant& user) const;
  // Counts a connection of the user that was refused, here or elsewhere.
  void CountRefused(const Tenant& user);
  // What each user has, and has been refused.
  std::map<Tenant, Usage> Users() const;
  // Finds the process of a call. `caller` is ServerContext::peer(). Empty if the connection has
  // ended.
  std::optional<ClientProcess> Find(const std::string& caller) const;
  // The input of a caller's connection. Null if the connection has ended.
  std::shared_ptr<ClientInput> Input(const std::string& caller) const;

 private:
  struct Entry {
    std::uint64_t id = 0;
    ClientProcess process;
    std::shared_ptr<void> descriptors;
    std::shared_ptr<ClientInput> input;
  };

  DescriptorQuota* const quota_;
  const int limit_;  // all descriptors are below it

  mutable Mutex mutex_;
  std::map<int, Entry> by_number_ ABSL_GUARDED_BY(mutex_);
  std::map<Tenant, std::size_t> per_user_ ABSL_GUARDED_BY(mutex_);
  std::map<Tenant, std::uint64_t> refused_ ABSL_GUARDED_BY(mutex_);
  int next_number_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;

  // Null: the connection has ended.
  const Entry* FindLocked(const std::string& caller) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EraseLocked(std::map<int, Entry>::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CONNECTIONS_H_
