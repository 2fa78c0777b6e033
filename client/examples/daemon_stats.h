// Asks a daemon for its counters and its address, as gradsyncctl and grpcurl do.

#ifndef CLIENT_EXAMPLES_DAEMON_STATS_H_
#define CLIENT_EXAMPLES_DAEMON_STATS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/gradsync/v1/introspection.pb.h"

namespace gradsync::examples {

// Introspection.GetStats of every job. The daemon's status if it does not answer in time.
absl::StatusOr<v1::GetStatsResponse> GetDaemonStats(const std::string& socket,
                                                    absl::Duration timeout);

// "host:port" where it listens for the daemons of other nodes.
absl::StatusOr<std::string> GetPeerAddress(const std::string& socket, absl::Duration timeout);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_DAEMON_STATS_H_
