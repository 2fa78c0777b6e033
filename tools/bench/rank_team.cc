#include "tools/bench/rank_team.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tools/bench/clocks.h"
#include "tools/bench/interrupt.h"
#include "tools/bench/rank_process.h"

namespace gradsync::bench {
namespace {

// Longer than Gloo needs for 1 GiB among 8 ranks on 2 cores.
constexpr absl::Duration kOrderTimeout = absl::Minutes(2);
constexpr absl::Duration kInterruptTimeout = absl::Seconds(2);
// How soon a rank's death is noticed.
constexpr absl::Duration kLookAround = absl::Milliseconds(200);
// For finalizing; then SIGTERM, then SIGKILL.
constexpr absl::Duration kQuitTimeout = absl::Seconds(5);
constexpr absl::Duration kTermTimeout = absl::Seconds(5);

}  // namespace

RankTeam::RankTeam(Implementation implementation, ControlBlock* control)
    : implementation_(implementation), control_(*control), team_(control->team(implementation)) {}

absl::StatusOr<std::unique_ptr<RankTeam>> RankTeam::Start(const RankTeamOptions& options) {
  std::unique_ptr<RankTeam> team(
      new RankTeam(options.implementation, AsControlBlock(*options.control)));
  absl::Status status = team->StartProcesses(options);
  if (!status.ok()) return status;
  team->healthy_ = true;
  status = team->Do(Phase::kConnect);
  if (!status.ok()) return status;
  return team;
}

absl::Status RankTeam::StartProcesses(const RankTeamOptions& options) {
  launched_ = !options.launcher.empty();
  const std::uint32_t processes = launched_ ? 1 : control_.ranks;
  const std::string log_path =
      absl::StrCat(control_.directory, "/", ImplementationName(implementation_), ".log");
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  for (std::uint32_t i = 0; i < processes; ++i) {
    RankProcessOptions rank;
    rank.implementation = implementation_;
    rank.control = options.control->path();
    if (!launched_) rank.rank = i;
    std::vector<std::string> command = options.launcher;
    if (options.network != nullptr) {
      command = options.network->CommandPrefix(static_cast<int>(control_.NodeOf(i)));
    }
    command.push_back(self);
    for (std::string& argument : RankProcessArguments(rank)) {
      command.push_back(std::move(argument));
    }
    absl::StatusOr<ChildProcess> process = ChildProcess::Start(command, log_path);
    if (!process.ok()) return process.status();
    processes_.push_back(*std::move(process));
  }
  return absl::OkStatus();
}

RankTeam::~RankTeam() {
  if (healthy_) {
    static_cast<void>(Do(Phase::kQuit));
    if (healthy_) {
      for (ChildProcess& process : processes_) process.AwaitEnd(kQuitTimeout);
    }
  }
  for (ChildProcess& process : processes_) process.Stop(kTermTimeout);
}

absl::Status RankTeam::Do(Phase phase, std::uint64_t iteration, bool check_all) {
  Order order = {};
  order.phase = phase;
  order.iteration = iteration;
  order.check_all = check_all;
  order.bytes = team_.order.bytes;
  return Do(order);
}

absl::Status RankTeam::Do(const Order& order) {
  if (Interrupted() != 0 && order.phase != Phase::kQuit) return absl::CancelledError("interrupted");
  team_.order = order;
  team_.arrivals.Reset();
  team_.orders.Post();
  absl::Status status = AwaitArrivals();
  for (std::uint32_t rank = 0; status.ok() && rank < control_.ranks; ++rank) {
    const RankReport& report = team_.reports[rank];
    if (report.failed == 0) continue;
    status = absl::InternalError(
        absl::StrCat(ImplementationName(implementation_), " rank ", rank, ": ", report.error));
  }
  if (!status.ok()) healthy_ = false;
  return status;
}

absl::Status RankTeam::AwaitArrivals() {
  const bool quit = team_.order.phase == Phase::kQuit;
  const absl::Duration limit = quit ? kQuitTimeout : kOrderTimeout;
  absl::Time deadline = absl::Now() + limit;
  while (!team_.arrivals.Wait(control_.ranks, kLookAround)) {
    // Ranks that may finish their order can then end in order.
    if (Interrupted() != 0) deadline = std::min(deadline, absl::Now() + kInterruptTimeout);
    for (const ChildProcess& process : processes_) {
      if (!quit && !process.Running()) return Died(process);
    }
    if (absl::Now() > deadline && Interrupted() != 0) return absl::CancelledError("interrupted");
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(ImplementationName(implementation_), " did not finish within ",
                       absl::FormatDuration(limit), ": ", processes_.front().LastOutput()));
    }
  }
  return absl::OkStatus();
}

absl::Status RankTeam::Died(const ChildProcess& process) const {
  return absl::InternalError(absl::StrCat("a process of ", ImplementationName(implementation_),
                                          " has died: ", process.LastOutput()));
}

std::int64_t RankTeam::LauncherCpuNs() const {
  return launched_ ? ProcessCpuNs(processes_.front().pid()) : 0;
}

}  // namespace gradsync::bench
