#include "tests/fault/two_nodes.h"

namespace gradsync::fault {

std::vector<std::string> TwoNodes::Flags(const std::string& address, const std::string& name,
                                         const std::vector<std::string>& more) {
  std::vector<std::string> flags = {"--peer_listen=" + address + ":0", "--node_name=" + name};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

TwoNodes::TwoNodes(const std::vector<std::string>& flags_of_alpha,
                   const std::vector<std::string>& flags_of_beta)
    : alpha_(Flags("127.0.0.1", "alpha", flags_of_alpha)),
      beta_(Flags("127.0.0.2", "beta", flags_of_beta)) {}

std::unique_ptr<Trainer> TwoNodes::MakeRank(std::uint32_t rank, std::uint32_t world,
                                            const std::string& options) const {
  return std::make_unique<Trainer>(rank < kPerNode ? alpha_ : beta_, rank, world, "job",
                                   "coordinator=" + coordinator() + " " + options);
}

Trainers TwoNodes::Join(std::uint32_t world, const std::string& options) const {
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    trainers.push_back(MakeRank(rank, world, options));
  }
  JoinAll(trainers);
  return trainers;
}

}  // namespace gradsync::fault
