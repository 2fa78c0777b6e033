// The conductor's side of one implementation's rank processes.

#ifndef TOOLS_BENCH_RANK_TEAM_H_
#define TOOLS_BENCH_RANK_TEAM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/bench/child_process.h"
#include "tools/bench/control_block.h"
#include "tools/bench/implementation.h"
#include "tools/bench/shared_region.h"
#include "tools/virtual_network/virtual_network.h"

namespace gradsync::bench {

struct RankTeamOptions {
  Implementation implementation = Implementation::kRoofline;
  const SharedRegion* control = nullptr;  // outlives the team
  // The command that starts all ranks, to which theirs is appended; empty: one process per rank is
  // started directly, on its node.
  std::vector<std::string> launcher;
  const VirtualNetwork* network = nullptr;  // of the nodes, if there are several
};

// Used by the main thread. The destructor ends every process.
class RankTeam {
 public:
  // Returns when every rank has connected to the others.
  static absl::StatusOr<std::unique_ptr<RankTeam>> Start(const RankTeamOptions& options);
  ~RankTeam();
  RankTeam(const RankTeam&) = delete;
  RankTeam& operator=(const RankTeam&) = delete;

  // Orders every rank and returns when all have done it.
  //   CANCELLED          the bench was interrupted.
  //   DEADLINE_EXCEEDED  a rank hangs.
  //   any other          names the rank and what it said, or quotes the log of a process that died.
  absl::Status Do(const Order& order);
  absl::Status Do(Phase phase, std::uint64_t iteration = 0, bool check_all = false);

  Implementation implementation() const { return implementation_; }
  const RankReport& report(std::uint32_t rank) const { return team_.reports[rank]; }
  std::uint32_t ranks() const { return control_.ranks; }
  // Of the launcher so far; its ranks report for themselves.
  std::int64_t LauncherCpuNs() const;

 private:
  RankTeam(Implementation implementation, ControlBlock* control);

  absl::Status StartProcesses(const RankTeamOptions& options);
  absl::Status AwaitArrivals();
  absl::Status Died(const ChildProcess& process) const;

  const Implementation implementation_;
  ControlBlock& control_;
  Team& team_;
  bool launched_ = false;  // by a launcher, the only process
  bool healthy_ = false;   // every order was obeyed
  std::vector<ChildProcess> processes_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_RANK_TEAM_H_
