// Statuses that another node sends.

#ifndef DAEMON_PEER_PEER_STATUS_H_
#define DAEMON_PEER_PEER_STATUS_H_

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace gradsync::daemon {

// A status that another node sent, cut to bounds: a known code, 4 KiB of UTF-8, one small detail.
absl::Status StatusFromPeer(const google::rpc::Status& proto);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_STATUS_H_
