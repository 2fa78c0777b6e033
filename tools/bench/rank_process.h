// A rank's process: does what the conductor orders, and sleeps in between.

#ifndef TOOLS_BENCH_RANK_PROCESS_H_
#define TOOLS_BENCH_RANK_PROCESS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/bench/implementation.h"

namespace gradsync::bench {

struct RankProcessOptions {
  Implementation implementation = Implementation::kRoofline;
  std::optional<std::uint32_t> rank;  // none: as the launcher's environment says
  std::string control;                // the control block's path()
};

// The arguments that make main() call RunRankProcess(), and back. Not for people's use.
std::vector<std::string> RankProcessArguments(const RankProcessOptions& options);
std::optional<RankProcessOptions> ParseRankProcessArguments(int argc, const char* const* argv);

// Returns after kQuit. Errors of orders go to the conductor, whose report names the rank; the
// returned status is about the process itself.
absl::Status RunRankProcess(const RankProcessOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_RANK_PROCESS_H_
