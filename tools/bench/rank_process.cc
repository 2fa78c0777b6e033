#include "tools/bench/rank_process.h"

#include <signal.h>
#include <sys/prctl.h>

#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tools/bench/busy_thread.h"
#include "tools/bench/clocks.h"
#include "tools/bench/control_block.h"
#include "tools/bench/openmpi_peer.h"
#include "tools/bench/pattern.h"
#include "tools/bench/peer.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {
namespace {

constexpr absl::string_view kCommand = "rank-process";

PeerOptions OptionsOf(const ControlBlock& control, std::uint32_t rank) {
  PeerOptions options;
  options.rank = rank;
  options.ranks = control.ranks;
  options.node = control.NodeOf(rank);
  options.dtype = control.dtype;
  options.directory = control.directory;
  options.address = control.addresses[options.node];
  options.coordinator = control.coordinator;
  options.gpus = control.gpus;
  options.cuda_library = control.cuda_library;
  options.nccl_library = control.nccl_library;
  return options;
}

class Rank {
 public:
  Rank(Implementation implementation, std::uint32_t rank, ControlBlock* control)
      : rank_(rank),
        ranks_(control->ranks),
        item_size_(ItemSize(control->dtype)),
        team_(control->team(implementation)),
        report_(team_.reports[rank]),
        pattern_(control->dtype, control->ranks),
        peer_(MakePeer(implementation, OptionsOf(*control, rank))) {
    if (control->busy) busy_ = std::make_unique<BusyThread>();
  }

  void Run() {
    std::uint32_t seen = 0;
    for (;;) {
      seen = team_.orders.WaitPast(seen);
      const Order& order = team_.order;
      const absl::Status status = Do(order);
      if (!status.ok()) {
        report_.failed = 1;
        std::strncpy(report_.error, status.ToString().c_str(), sizeof(report_.error) - 1);
      }
      const bool quit = order.phase == Phase::kQuit;
      team_.arrivals.Arrive(ranks_);
      if (quit) return;
    }
  }

 private:
  absl::Status Do(const Order& order) {
    switch (order.phase) {
      case Phase::kConnect:
        return peer_->Connect();
      case Phase::kSetUp:
        count_ = order.bytes / item_size_;
        return peer_->SetUp(order);
      case Phase::kFill:
        if (busy_ != nullptr) busy_->Start();
        pattern_.Fill(rank_, order.iteration, peer_->buffer(), count_);
        return peer_->Upload();
      case Phase::kCall:
        return Call();
      case Phase::kCheck:
        if (busy_ != nullptr) busy_->Stop();
        return Check(order);
      case Phase::kTearDown:
        return peer_->TearDown();
      case Phase::kQuit:
        peer_.reset();
        return absl::OkStatus();
    }
    return absl::InternalError("unknown phase");
  }

  absl::Status Check(const Order& order) {
    report_.wrong = 0;
    if (!peer_->averages()) return absl::OkStatus();
    absl::Status status = peer_->Download();
    if (!status.ok()) return status;
    report_.wrong = pattern_.CountWrong(order.iteration, peer_->buffer(), count_, order.check_all);
    return absl::OkStatus();
  }

  absl::Status Call() {
    const std::int64_t cpu_ns = CpuNs();
    HandoffTimes times = {};
    team_.barrier.Wait(ranks_);
    const std::int64_t call_ns = MonotonicNs();
    absl::Status status = peer_->AllReduce(&times);
    const std::int64_t return_ns = MonotonicNs();
    // A rank that is done early must not compete with another that is being timed.
    team_.barrier.Wait(ranks_);
    status.Update(peer_->EndStep(&times));
    report_.call_ns = call_ns;
    report_.return_ns = return_ns;
    report_.handoff = times;
    report_.cpu_ns = CpuNs() - cpu_ns;
    return status;
  }

  std::int64_t CpuNs() { return ProcessCpuNs() - (busy_ == nullptr ? 0 : busy_->CpuNs()); }

  const std::uint32_t rank_;
  const std::uint32_t ranks_;
  const std::size_t item_size_;
  Team& team_;
  RankReport& report_;
  const Pattern pattern_;
  std::unique_ptr<Peer> peer_;
  std::unique_ptr<BusyThread> busy_;
  std::size_t count_ = 0;
};

}  // namespace

std::vector<std::string> RankProcessArguments(const RankProcessOptions& options) {
  std::vector<std::string> arguments = {
      std::string(kCommand),
      absl::StrCat("--impl=", ImplementationName(options.implementation)),
      absl::StrCat("--control=", options.control),
  };
  if (options.rank.has_value()) arguments.push_back(absl::StrCat("--rank=", *options.rank));
  return arguments;
}

std::optional<RankProcessOptions> ParseRankProcessArguments(int argc, const char* const* argv) {
  if (argc < 2 || argv[1] != kCommand) return std::nullopt;
  RankProcessOptions options;
  for (int i = 2; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--impl=")) {
      options.implementation = ParseImplementation(argument).value_or(Implementation::kRoofline);
    } else if (absl::ConsumePrefix(&argument, "--control=")) {
      options.control = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--rank=")) {
      std::uint32_t rank = 0;
      if (absl::SimpleAtoi(argument, &rank)) options.rank = rank;
    }
  }
  return options;
}

absl::Status RunRankProcess(const RankProcessOptions& options) {
  // Nobody is left behind by a bench that is killed: the parent is the bench or its mpirun.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  absl::StatusOr<SharedRegion> region = SharedRegion::Open(options.control);
  if (!region.ok()) return region.status();
  ControlBlock* const control = AsControlBlock(*region);
  absl::StatusOr<std::uint32_t> rank =
      options.rank.has_value() ? absl::StatusOr<std::uint32_t>(*options.rank) : OpenMpiRank();
  if (!rank.ok()) return rank.status();
  if (*rank >= control->ranks) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", *rank, " of ", control->ranks));
  }
  Rank(options.implementation, *rank, control).Run();
  return absl::OkStatus();
}

}  // namespace gradsync::bench
