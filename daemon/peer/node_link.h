// The connection to another node's daemon, for one job that this node coordinates.

#ifndef DAEMON_PEER_NODE_LINK_H_
#define DAEMON_PEER_NODE_LINK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "daemon/engine/engine_settings.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync::daemon {

// Thread-safe. Owned by its stream; the NodeGroup forgets it when it has ended.
class NodeLink {
 public:
  virtual ~NodeLink() = default;
  virtual void Queue(v1::AttachResponse message) = 0;
  virtual void Flush() = 0;
  // Drops later messages, and ends the stream with `status` when everything queued has been sent.
  virtual void Close(const absl::Status& status) = 0;
  // Constant once ranks have joined.
  virtual const std::string& node_name() const = 0;
  // The other node's numeric address, as this node sees it.
  virtual const std::string& address() const = 0;
  // The network of that address, as NetworkText() writes it (caller.h).
  virtual const std::string& network() const = 0;
  // What an engine may have there. Constant once ranks have joined.
  virtual const EngineLimits& engine_limits() const = 0;
  // When its last message arrived.
  virtual std::uint64_t heard_ns() const = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_NODE_LINK_H_
