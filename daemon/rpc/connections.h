// The trainers' connections to the gRPC socket: which process is behind the "fd:N" that gRPC calls
// a peer.
//
// gRPC owns a connection's descriptor and closes it when it likes; the number may then be given to
// the next connection. Two things keep one user's call from being taken for another's: numbers are
// taken in rotation, so that one comes round only after hundreds of connections, and an entry goes
// as soon as the other end has closed.
//
// Thread-safe.

#ifndef DAEMON_RPC_CONNECTIONS_H_
#define DAEMON_RPC_CONNECTIONS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/session/peer_process.h"

namespace gradsync {

class Connections {
 public:
  // Connections that one user may have open at once; sessions have a quota of their own.
  static constexpr std::size_t kPerUser = 1024;

  Connections();

  struct Admitted {
    UniqueFd for_grpc;  // hand it over with release()
    std::uint64_t id = 0;
  };
  // RESOURCE_EXHAUSTED: the user has too many connections, or the process too many descriptors.
  absl::StatusOr<Admitted> Admit(const UniqueFd& accepted, const PeerProcess& peer);
  void Remove(std::uint64_t id);
  // `grpc_peer` is ServerContext::peer(). Empty if the connection has gone.
  std::optional<PeerProcess> Find(const std::string& grpc_peer) const;

 private:
  struct Entry {
    std::uint64_t id = 0;
    PeerProcess peer;
  };

  const int limit_;  // descriptors are below it

  mutable Mutex mutex_;
  std::map<int, Entry> by_number_ ABSL_GUARDED_BY(mutex_);
  std::map<uid_t, std::size_t> per_user_ ABSL_GUARDED_BY(mutex_);
  int next_number_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;

  void EraseLocked(std::map<int, Entry>::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
};

}  // namespace gradsync

#endif  // DAEMON_RPC_CONNECTIONS_H_
