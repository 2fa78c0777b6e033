// Several nodes on one machine, with a real network between them.

#ifndef TOOLS_VIRTUAL_NETWORK_VIRTUAL_NETWORK_H_
#define TOOLS_VIRTUAL_NETWORK_VIRTUAL_NETWORK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/unique_fd.h"

namespace gradsync {

struct VirtualNetworkOptions {
  int nodes = 2;  // 1 to 250
  // The rate of every node's link, in bits per second and in each direction. 0: as fast as memory.
  std::uint64_t bits_per_second = 0;
  // Uses loopback addresses even if the machine can make namespaces. The environment variable
  // GRADSYNC_VIRTUAL_NETWORK=loopback has the same effect.
  bool loopback = false;
};

// Each node is a network namespace with one interface, eth0, and an address 10.99.0.(node+1); a
// virtual cable leads from it to a switch, a bridge in a namespace of its own. A token
// bucket at either end of the cable enforces the rate. Its burst is what the rate carries in 4 ms,
// at least 16 KiB; its queue is what the rate carries in 20 ms.
//
// The namespaces have no names. Descriptors of this object and the processes inside hold them, so
// they disappear when both have ended, whatever the cause.
//
// Namespaces need root and Debian's iproute2. Without them every node is this machine under its own
// address, 127.0.0.(node+1): nothing separates the nodes, no rate is kept and no cable can be
// pulled. description() says so. Programs and tests should print it.
//
// Thread-safe, except SetLink() and SetIsolated(): one thread at a time.
class VirtualNetwork {
 public:
  enum class Kind { kNamespaces, kLoopback };

  explicit VirtualNetwork(const VirtualNetworkOptions& options);
  VirtualNetwork(const VirtualNetwork&) = delete;
  VirtualNetwork& operator=(const VirtualNetwork&) = delete;

  Kind kind() const { return kind_; }
  int nodes() const { return nodes_; }
  // For example "2 network namespaces, links of 1gbit"; or "loopback addresses", and why.
  const std::string& description() const { return description_; }
  std::string address(int node) const;

  // The words to put before a command so that it runs on the node, in a process of the same pid.
  // Empty on loopback. Any process of this user on this machine can use them while this object
  // lives.
  std::vector<std::string> CommandPrefix(int node) const;

  // Moves the calling thread to the node for the rest of its life. Its new sockets, processes and
  // threads are on the node. Does nothing on loopback.
  absl::Status Enter(int node) const;

  // Pulls the node's cable out of the switch, or plugs it in. Packets are lost and no process is
  // notified. UNIMPLEMENTED on loopback.
  absl::Status SetLink(int node, bool up);

  // The switch drops packets between isolated nodes. Every other pair of nodes still reaches each
  // other. UNIMPLEMENTED on loopback.
  absl::Status SetIsolated(int node, bool isolated);

 private:
  absl::Status MakeNamespaces(std::uint64_t bits_per_second);

  const int nodes_;
  // Constant after construction.
  Kind kind_ = Kind::kLoopback;
  std::string description_;
  daemon::UniqueFd switch_;                   // of the switch's namespace
  std::vector<daemon::UniqueFd> namespaces_;  // of the nodes'
};

}  // namespace gradsync

#endif  // TOOLS_VIRTUAL_NETWORK_VIRTUAL_NETWORK_H_
