#include "tools/bench/lineup.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tools/bench/daemon_process.h"
#include "tools/bench/machine.h"
#include "tools/bench/openmpi_peer.h"

namespace gradsync::bench {
namespace {

bool Contains(const std::vector<Implementation>& list, Implementation implementation) {
  return std::find(list.begin(), list.end(), implementation) != list.end();
}

}  // namespace

absl::StatusOr<Lineup> MakeLineup(const Options& options) {
  Lineup lineup;
  ContestOptions& contest = lineup.contest;
  contest.ranks = options.ranks;
  contest.dtype = options.dtype;
  contest.busy = options.busy;
  contest.threads = options.threads != 0 ? options.threads : UsableCores();
  contest.daemon = options.daemon;
  contest.implementations = options.implementations;
  if (options.command == Command::kHandoff) {
    contest.implementations = {Implementation::kGradsync};
  } else if (options.implementations.empty()) {
    contest.implementations = {Implementation::kRoofline, Implementation::kGradsync,
                               Implementation::kGloo, Implementation::kOpenMpi};
  }
  if (Contains(contest.implementations, Implementation::kOpenMpi)) {
    const absl::Status openmpi = OpenMpiLauncher(options.ranks, "", "").status();
    if (!openmpi.ok() && !options.implementations.empty()) {
      return absl::FailedPreconditionError(absl::StrCat("--impl openmpi: ", openmpi.message()));
    }
    if (!openmpi.ok()) {
      contest.implementations.pop_back();
      lineup.notes.push_back(absl::StrCat("without openmpi: ", openmpi.message()));
    }
  }
  if (Contains(contest.implementations, Implementation::kGradsync) && contest.daemon.empty()) {
    absl::StatusOr<std::string> daemon = FindDaemon();
    if (!daemon.ok()) return absl::FailedPreconditionError(daemon.status().message());
    contest.daemon = *std::move(daemon);
  }
  return lineup;
}

}  // namespace gradsync::bench
