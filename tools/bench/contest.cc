#include "tools/bench/contest.h"

#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "tools/bench/daemon_process.h"
#include "tools/bench/openmpi_peer.h"
#include "tools/bench/roofline_contender.h"

namespace gradsync::bench {

absl::StatusOr<std::unique_ptr<Contest>> Contest::Start(const ContestOptions& options) {
  std::unique_ptr<Contest> contest(new Contest());
  absl::StatusOr<TemporaryDirectory> directory = TemporaryDirectory::Create();
  if (!directory.ok()) return directory.status();
  contest->directory_ = *std::move(directory);
  absl::StatusOr<SharedRegion> control = CreateControlBlock();
  if (!control.ok()) return control.status();
  contest->control_ = *std::move(control);
  ControlBlock* const block = AsControlBlock(contest->control_);
  block->ranks = options.ranks;
  block->dtype = options.dtype;
  block->busy = options.busy;
  const std::string& path = contest->directory_.path();
  if (path.size() >= sizeof(block->directory)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is too long; set TMPDIR"));
  }
  std::memcpy(block->directory, path.c_str(), path.size() + 1);
  for (const Implementation implementation : options.implementations) {
    absl::Status status = contest->StartContender(options, implementation);
    if (!status.ok()) return status;
  }
  return contest;
}

absl::Status Contest::StartContender(const ContestOptions& options, Implementation implementation) {
  RankTeamOptions team_options;
  team_options.implementation = implementation;
  team_options.control = &control_;
  const ChildProcess* server = nullptr;
  // Open MPI's shared memory has a name until every rank has mapped it. Removed then: it would
  // outlive a bench that is killed.
  TemporaryDirectory shared_directory;
  if (implementation == Implementation::kOpenMpi) {
    absl::StatusOr<TemporaryDirectory> shared = TemporaryDirectory::Create("/dev/shm");
    if (!shared.ok()) return shared.status();
    shared_directory = *std::move(shared);
    absl::StatusOr<std::vector<std::string>> launcher =
        OpenMpiLauncher(options.ranks, directory_.path(), shared_directory.path());
    if (!launcher.ok()) return launcher.status();
    team_options.launcher = *std::move(launcher);
  } else if (implementation == Implementation::kGradsync) {
    absl::StatusOr<ChildProcess> daemon =
        StartDaemon(options.daemon, directory_.path(), options.threads);
    if (!daemon.ok()) return daemon.status();
    daemon_ = *std::move(daemon);
    server = &daemon_;
  }
  absl::StatusOr<std::unique_ptr<RankTeam>> team = RankTeam::Start(team_options);
  if (!team.ok()) return team.status();
  if (implementation == Implementation::kRoofline) {
    contenders_.push_back(
        std::make_unique<RooflineContender>(*std::move(team), options.dtype, options.threads));
  } else {
    contenders_.push_back(std::make_unique<Contender>(*std::move(team), server));
  }
  return absl::OkStatus();
}

absl::Status Contest::WithDaemonLog(const absl::Status& status,
                                    Implementation implementation) const {
  if (implementation != Implementation::kGradsync || absl::IsCancelled(status)) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), "\ngradsyncd ",
                                                  daemon_.Running() ? "runs" : "has ended",
                                                  " and says:\n", daemon_.LastOutput()));
}

absl::StatusOr<std::vector<Score>> Contest::Run(
    std::uint64_t bytes, std::uint64_t warmup, std::uint64_t iterations,
    const std::function<void(std::uint64_t)>& progress) {
  std::vector<Score> scores(contenders_.size());
  for (std::size_t i = 0; i < contenders_.size(); ++i) {
    scores[i].implementation = contenders_[i]->implementation();
    scores[i].turns.reserve(iterations);
    absl::Status status = contenders_[i]->SetUp(bytes);
    if (!status.ok()) return WithDaemonLog(status, scores[i].implementation);
  }
  const std::uint64_t total = warmup + iterations;
  for (std::uint64_t iteration = 0; iteration < total; ++iteration) {
    const bool check_all = iteration == 0 || iteration + 1 == total;
    absl::Status status = Iterate(iteration, iteration < warmup, check_all, &scores);
    if (!status.ok()) return status;
    progress(iteration + 1);
  }
  for (const std::unique_ptr<Contender>& contender : contenders_) {
    absl::Status status = contender->TearDown();
    if (!status.ok()) return status;
  }
  return scores;
}

absl::Status Contest::Iterate(std::uint64_t iteration, bool warm, bool check_all,
                              std::vector<Score>* scores) {
  for (std::size_t i = 0; i < contenders_.size(); ++i) {
    const std::size_t next = (iteration + i) % contenders_.size();
    absl::StatusOr<Turn> turn = contenders_[next]->Take(iteration, check_all);
    if (!turn.ok()) return WithDaemonLog(turn.status(), contenders_[next]->implementation());
    Score& score = (*scores)[next];
    score.wrong += turn->wrong;
    if (!warm) score.turns.push_back(*turn);
  }
  return absl::OkStatus();
}

}  // namespace gradsync::bench
