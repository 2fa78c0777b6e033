// Two nodes: a daemon each, on a loopback address of its own, and the ranks of a job on both.

#ifndef TESTS_FAULT_TWO_NODES_H_
#define TESTS_FAULT_TWO_NODES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/fault/test_daemon.h"
#include "tests/fault/trainer.h"

namespace gradsync::fault {

// Node alpha coordinates: it has ranks 0 and 1; beta has the others.
class TwoNodes {
 public:
  static constexpr std::uint32_t kPerNode = 2;

  explicit TwoNodes(const std::vector<std::string>& flags_of_alpha = {},
                    const std::vector<std::string>& flags_of_beta = {});

  TestDaemon& alpha() { return alpha_; }
  const TestDaemon& alpha() const { return alpha_; }
  TestDaemon& beta() { return beta_; }
  const TestDaemon& beta() const { return beta_; }
  std::string coordinator() const { return alpha_.Status().peer_address(); }

  // Started, not joined. `options` as of Trainer.
  std::unique_ptr<Trainer> MakeRank(std::uint32_t rank, std::uint32_t world,
                                    const std::string& options = "") const;
  // All ranks of job "job", joined.
  std::vector<std::unique_ptr<Trainer>> Join(std::uint32_t world = 4,
                                             const std::string& options = "") const;

 private:
  TestDaemon alpha_;
  TestDaemon beta_;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_TWO_NODES_H_
