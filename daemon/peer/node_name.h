// The name of a node, which appears in messages, status and logs of all nodes of a job.

#ifndef DAEMON_PEER_NODE_NAME_H_
#define DAEMON_PEER_NODE_NAME_H_

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

// 1 to kMaxNodeNameBytes printable ASCII characters.
inline bool IsNodeName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxNodeNameBytes &&
         std::all_of(name.begin(), name.end(), absl::ascii_isprint);
}

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_NODE_NAME_H_
