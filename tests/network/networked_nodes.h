// Daemons on nodes of a virtual network, and the ranks of a job on all of them.

#ifndef TESTS_NETWORK_NETWORKED_NODES_H_
#define TESTS_NETWORK_NETWORKED_NODES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/fault/trainer.h"
#include "tests/kit/test_daemon.h"
#include "tools/virtual_network/virtual_network.h"

namespace gradsync::fault {

// One daemon and two ranks per node. The nodes are alpha, beta and gamma.
class NetworkedNodes {
 public:
  static constexpr std::uint32_t kRanksPerNode = 2;

  // Makes up to 3 nodes, and prints whether they are real namespaces or loopback addresses. The
  // daemons listen on `port`; on any free port if `port` is 0 or the nodes are on loopback. `flags`
  // are added to the flags of each daemon.
  explicit NetworkedNodes(int nodes, std::uint64_t bits_per_second = 0, int port = 0,
                          const std::vector<std::string>& flags = {});

  // True if the nodes are on a virtual network, false if they are on loopback.
  bool real() const { return network_.kind() == VirtualNetwork::Kind::kNamespaces; }
  VirtualNetwork& network() { return network_; }
  TestDaemon& daemon(int node) { return *daemons_[static_cast<std::size_t>(node)]; }
  static std::string Name(int node);
  // "host:port" of the daemon of node 0 after its last start.
  std::string coordinator() const;

  std::uint32_t world_size() const {
    return static_cast<std::uint32_t>(network_.nodes()) * kRanksPerNode;
  }
  static int NodeOf(std::uint32_t rank) { return static_cast<int>(rank / kRanksPerNode); }
  // Starts a rank that has not joined. `options` are added to its join, and may name another
  // coordinator.
  std::unique_ptr<Trainer> MakeRank(std::uint32_t rank, const std::string& options = "");
  // Starts and joins every rank.
  Trainers Join(const std::string& options = "");
  // Starts and joins the ranks of a job on the first `nodes` nodes alone.
  Trainers JoinOn(int nodes);

 private:
  VirtualNetwork network_;
  std::vector<std::unique_ptr<TestDaemon>> daemons_;
};

}  // namespace gradsync::fault

#endif  // TESTS_NETWORK_NETWORKED_NODES_H_
