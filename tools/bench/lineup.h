// Who can take part on this machine.

#ifndef TOOLS_BENCH_LINEUP_H_
#define TOOLS_BENCH_LINEUP_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/bench/contest.h"
#include "tools/bench/options.h"

namespace gradsync::bench {

struct Lineup {
  ContestOptions contest;
  std::vector<std::string> notes;  // who is missing, and why
};

// FAILED_PRECONDITION if somebody who was named is not there.
absl::StatusOr<Lineup> MakeLineup(const Options& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_LINEUP_H_
