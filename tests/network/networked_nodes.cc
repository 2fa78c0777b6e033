#include "tests/network/networked_nodes.h"

#include <array>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace gradsync::fault {
NetworkedNodes::NetworkedNodes(int nodes, std::uint64_t bits_per_second, int port,
                               const std::vector<std::string>& flags)
    : network_({nodes, bits_per_second}) {
  std::printf("network: %s\n", network_.description().c_str());
  std::fflush(stdout);
  for (int node = 0; node < nodes; ++node) {
    std::vector<std::string> all = {
        absl::StrCat("--peer_listen=", network_.address(node), ":", real() ? port : 0),
        "--peer_plain_text=true", absl::StrCat("--node_name=", Name(node))};
    all.insert(all.end(), flags.begin(), flags.end());
    daemons_.push_back(std::make_unique<TestDaemon>(all, std::vector<std::string>{},
                                                    network_.CommandPrefix(node)));
  }
}

std::string NetworkedNodes::Name(int node) {
  static constexpr std::array<const char*, 3> kNames = {"alpha", "beta", "gamma"};
  return kNames.at(static_cast<std::size_t>(node));
}

std::string NetworkedNodes::coordinator() const { return daemons_[0]->Status().peer_address(); }

std::unique_ptr<Trainer> NetworkedNodes::MakeRank(std::uint32_t rank, const std::string& options) {
  const std::string coordinator_option =
      absl::StrContains(options, "coordinator=") ? "" : "coordinator=" + coordinator() + " ";
  return std::make_unique<Trainer>(daemon(NodeOf(rank)), rank, world_size(), "job",
                                   coordinator_option + options);
}

Trainers NetworkedNodes::Join(const std::string& options) {
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < world_size(); ++rank) {
    trainers.push_back(MakeRank(rank, options));
  }
  JoinAll(trainers);
  return trainers;
}

Trainers NetworkedNodes::JoinOn(int nodes) {
  const std::uint32_t world = static_cast<std::uint32_t>(nodes) * kRanksPerNode;
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(daemon(NodeOf(rank)), rank, world, "job",
                                                 "coordinator=" + coordinator()));
  }
  JoinAll(trainers);
  return trainers;
}

}  // namespace gradsync::fault
