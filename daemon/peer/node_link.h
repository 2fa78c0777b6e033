// The way to another node's daemon, for the jobs that this one coordinates.

#ifndef DAEMON_PEER_NODE_LINK_H_
#define DAEMON_PEER_NODE_LINK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync {

// Thread-safe.
class NodeLink {
 public:
  virtual ~NodeLink() = default;
  virtual void Queue(v1::AttachResponse message) = 0;
  virtual void Flush() = 0;
  // Nothing more is queued; its stream ends, in order if `status` is OK, once what is has gone out.
  virtual void Close(const absl::Status& status) = 0;
  // Constant once ranks join by it.
  virtual const std::string& node_name() const = 0;
  // As this node sees it; numeric.
  virtual const std::string& address() const = 0;
  // When its last message came.
  virtual std::uint64_t heard_ns() const = 0;
};

}  // namespace gradsync

#endif  // DAEMON_PEER_NODE_LINK_H_
