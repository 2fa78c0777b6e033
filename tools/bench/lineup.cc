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

std::unique_ptr<VirtualNetwork> MakeNetwork(const Options& options,
                                            std::vector<std::string>* notes) {
  VirtualNetworkOptions network_options;
  network_options.nodes = static_cast<int>(options.nodes);
  network_options.bits_per_second = options.bits_per_second;
  auto network = std::make_unique<VirtualNetwork>(network_options);
  notes->push_back(absl::StrCat("nodes: ", network->description()));
  if (network->kind() == VirtualNetwork::Kind::kLoopback) {
    notes->push_back(absl::StrCat("their links are unlimited",
                                  options.bits_per_second == 0 ? "" : ": --rate is not kept"));
  }
  return network;
}

}  // namespace

absl::StatusOr<Lineup> MakeLineup(const Options& options) {
  Lineup lineup;
  ContestOptions& contest = lineup.contest;
  contest.ranks = options.ranks;
  if (options.nodes > 1) {
    lineup.network = MakeNetwork(options, &lineup.notes);
    contest.network = lineup.network.get();
    if (lineup.network->kind() == VirtualNetwork::Kind::kNamespaces) {
      lineup.bits_per_second = options.bits_per_second;
    }
  }
  contest.dtype = options.dtype;
  contest.busy = options.busy;
  contest.threads =
      options.threads != 0 ? options.threads : std::max(UsableCores() / options.nodes, 1u);
  contest.daemon = options.daemon;
  contest.gpus = options.gpus;
  contest.cuda_library = options.cuda_library;
  contest.nccl_library = options.nccl_library;
  contest.implementations = options.implementations;
  if (options.command == Command::kHandoff) {
    contest.implementations = {Implementation::kGradsync};
    if (options.gpus > 0) contest.implementations.push_back(Implementation::kNccl);
  } else if (options.implementations.empty() && options.gpus > 0) {
    contest.implementations = {Implementation::kRoofline, Implementation::kKernels,
                               Implementation::kGradsync};
    if (options.ranks == options.gpus) contest.implementations.push_back(Implementation::kNccl);
  } else if (options.implementations.empty() && options.nodes > 1) {
    contest.implementations = {Implementation::kGradsync, Implementation::kGloo};
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
