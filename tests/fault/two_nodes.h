// Two nodes and the ranks of a job on both. Each node has a daemon on its own loopback address.

#ifndef TESTS_FAULT_TWO_NODES_H_
#define TESTS_FAULT_TWO_NODES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/fault/trainer.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::fault {

// Node alpha is the coordinator's and has ranks 0 and 1. Node beta has the others.
class TwoNodes {
 public:
  static constexpr std::uint32_t kPerNode = 2;

  // Flags of a daemon on a node of that name and address.
  static std::vector<std::string> Flags(const std::string& address, const std::string& name,
                                        const std::vector<std::string>& more = {});

  explicit TwoNodes(const std::vector<std::string>& flags_of_alpha = {},
                    const std::vector<std::string>& flags_of_beta = {});

  TestDaemon& alpha() { return alpha_; }
  const TestDaemon& alpha() const { return alpha_; }
  TestDaemon& beta() { return beta_; }
  const TestDaemon& beta() const { return beta_; }
  std::string coordinator() const { return alpha_.Status().peer_address(); }

  // Starts a rank but does not join. `options`: as for Trainer.
  std::unique_ptr<Trainer> MakeRank(std::uint32_t rank, std::uint32_t world,
                                    const std::string& options = "") const;
  // Returns all ranks of job "job", joined.
  Trainers Join(std::uint32_t world = 4, const std::string& options = "") const;

 private:
  TestDaemon alpha_;
  TestDaemon beta_;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_TWO_NODES_H_
