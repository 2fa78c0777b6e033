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
  // Of every node's link, in each direction by itself; 0: as fast as memory.
  std::uint64_t bits_per_second = 0;
  // Loopback addresses also where namespaces can be made. GRADSYNC_VIRTUAL_NETWORK=loopback in the
  // environment asks for the same.
  bool loopback = false;
};

// Each node is a network namespace with one interface, eth0, and an address 10.99.0.(node+1); a
// virtual cable leads from it to a switch, a bridge in a namespace of its own. A rate is kept by a
// token bucket at either end of the cable: it lets pass at once what the rate carries in 4 ms, and
// queues what it carries in 20 ms.
//
// The namespaces have no names: descriptors of this object and the processes inside hold them, so
// that nothing is left of them when both have ended, in whatever way.
//
// Where namespaces cannot be made (it takes root and Debian's iproute2), every node is this machine
// under an address of its own, 127.0.0.(node+1): nothing separates the nodes, no rate is kept, no
// cable can be pulled. description() says so; show it.
//
// Thread-safe but for SetLink() and SetIsolated(), for one thread at a time.
class VirtualNetwork {
 public:
  enum class Kind { kNamespaces, kLoopback };

  explicit VirtualNetwork(const VirtualNetworkOptions& options);
  VirtualNetwork(const VirtualNetwork&) = delete;
  VirtualNetwork& operator=(const VirtualNetwork&) = delete;

  Kind kind() const { return kind_; }
  int nodes() const { return nodes_; }
  // "2 network namespaces, links of 1gbit", or that it is loopback addresses, and why.
  const std::string& description() const { return description_; }
  std::string address(int node) const;

  // What stands before a command (the program and its arguments) to run it on the node, in a
  // process of the same pid. Empty on loopback. Usable by any process of this user and machine
  // while this object lives.
  std::vector<std::string> CommandPrefix(int node) const;

  // Puts the calling thread onto the node, for the rest of its life: its new sockets are there, and
  // so are its new processes and threads. Does nothing on loopback.
  absl::Status Enter(int node) const;

  // Pulls the node's cable out of the switch, or plugs it in: no process is told, packets are lost.
  // UNIMPLEMENTED on loopback.
  absl::Status SetLink(int node, bool up);

  // The switch passes nothing between isolated nodes; they and the others still reach each other.
  // Packets are lost as behind a pulled cable. UNIMPLEMENTED on loopback.
  absl::Status SetIsolated(int node, bool isolated);

 private:
  absl::Status MakeNamespaces(std::uint64_t bits_per_second);

  const int nodes_;
  // Constant after construction.
  Kind kind_ = Kind::kLoopback;
  std::string description_;
  UniqueFd switch_;                   // of the switch's namespace
  std::vector<UniqueFd> namespaces_;  // of the nodes'
};

}  // namespace gradsync

#endif  // TOOLS_VIRTUAL_NETWORK_VIRTUAL_NETWORK_H_
