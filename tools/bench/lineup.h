// Who can take part on this machine.

#ifndef TOOLS_BENCH_LINEUP_H_
#define TOOLS_BENCH_LINEUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/bench/contest.h"
#include "tools/bench/options.h"
#include "tools/virtual_network/virtual_network.h"

namespace gradsync::bench {

struct Lineup {
  std::unique_ptr<VirtualNetwork> network;  // null: one node
  std::uint64_t bits_per_second = 0;        // that the nodes' links really have; 0: unlimited
  ContestOptions contest;
  std::vector<std::string> notes;  // who is missing, and why
};

// FAILED_PRECONDITION if somebody who was named is not there.
absl::StatusOr<Lineup> MakeLineup(const Options& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_LINEUP_H_
