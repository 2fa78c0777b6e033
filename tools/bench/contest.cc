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
  block->nodes = options.network == nullptr ? 1 : options.network->nodes();
  block->ranks = options.ranks * block->nodes;
  block->dtype = options.dtype;
  block->busy = options.busy;
  block->gpus = options.gpus;
  // Their lengths were checked with the command line.
  std::strncpy(block->cuda_library, options.cuda_library.c_str(), kMaxPath - 1);
  std::strncpy(block->nccl_library, options.nccl_library.c_str(), kMaxPath - 1);
  const std::string& path = contest->directory_.path();
  if (path.size() >= sizeof(block->directory)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is too long; set TMPDIR"));
  }
  std::memcpy(block->directory, path.c_str(), path.size() + 1);
  for (std::uint32_t node = 0; node < block->nodes; ++node) {
    const std::string address =
        options.network == nullptr ? "127.0.0.1" : options.network->address(static_cast<int>(node));
    std::strncpy(block->addresses[node], address.c_str(), kMaxAddress - 1);
  }
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
  team_options.network = options.network;
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
    absl::Status status = StartDaemons(options);
    if (!status.ok()) return status;
  }
  absl::StatusOr<std::unique_ptr<RankTeam>> team = RankTeam::Start(team_options);
  if (!team.ok()) return team.status();
  if (implementation == Implementation::kRoofline && options.gpus == 0) {
    contenders_.push_back(
        std::make_unique<RooflineContender>(*std::move(team), options.dtype, options.threads));
  } else {
    contenders_.push_back(std::make_unique<Contender>(
        *std::move(team), implementation == Implementation::kGradsync ? &daemons_ : nullptr));
  }
  return absl::OkStatus();
}

absl::Status Contest::StartDaemons(const ContestOptions& options) {
  ControlBlock* const block = AsControlBlock(control_);
  for (std::uint32_t node = 0; node < block->nodes; ++node) {
    DaemonOptions daemon;
    daemon.program = options.daemon;
    daemon.directory = directory_.path();
    daemon.node = node;
    daemon.reduce_threads = options.threads;
    if (options.gpus > 0) {
      daemon.cuda_library = options.cuda_library;
      daemon.nccl_library = options.nccl_library;
    }
    std::vector<std::string> prefix;
    if (options.network != nullptr) {
      daemon.address = block->addresses[node];
      prefix = options.network->CommandPrefix(static_cast<int>(node));
    }
    absl::StatusOr<ChildProcess> process = ChildProcess::Start(
        DaemonCommand(daemon, std::move(prefix)), DaemonLog(directory_.path(), node));
    if (!process.ok()) return process.status();
    daemons_.push_back(*std::move(process));
  }
  if (options.network == nullptr) return absl::OkStatus();
  const absl::StatusOr<std::string> coordinator = AwaitPeerAddress(directory_.path(), 0);
  if (!coordinator.ok()) return WithDaemonLogs(coordinator.status(), Implementation::kGradsync);
  std::strncpy(block->coordinator, coordinator->c_str(), kMaxAddress - 1);
  return absl::OkStatus();
}

absl::Status Contest::WithDaemonLogs(const absl::Status& status,
                                     Implementation implementation) const {
  if (implementation != Implementation::kGradsync || absl::IsCancelled(status)) return status;
  std::string text(status.message());
  for (std::size_t node = 0; node < daemons_.size(); ++node) {
    absl::StrAppend(&text, "\ngradsyncd",
                    daemons_.size() > 1 ? absl::StrCat(" of node ", node) : "",
                    daemons_[node].Running() ? " runs" : " has ended", " and says:\n",
                    daemons_[node].LastOutput());
  }
  return absl::Status(status.code(), text);
}

absl::StatusOr<std::vector<Score>> Contest::Run(
    std::uint64_t bytes, std::uint64_t warmup, std::uint64_t iterations,
    const std::function<void(std::uint64_t)>& progress) {
  std::vector<Score> scores(contenders_.size());
  for (std::size_t i = 0; i < contenders_.size(); ++i) {
    scores[i].implementation = contenders_[i]->implementation();
    scores[i].turns.reserve(iterations);
    absl::Status status = contenders_[i]->SetUp(bytes);
    if (!status.ok()) return WithDaemonLogs(status, scores[i].implementation);
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
    if (!turn.ok()) return WithDaemonLogs(turn.status(), contenders_[next]->implementation());
    Score& score = (*scores)[next];
    score.wrong += turn->wrong;
    if (!warm) score.turns.push_back(*turn);
  }
  return absl::OkStatus();
}

}  // namespace gradsync::bench
