#include "tools/bench/contender.h"

#include "tools/bench/clocks.h"

namespace gradsync::bench {

absl::Status Contender::SetUp(std::uint64_t bytes) {
  Order order = {};
  order.phase = Phase::kSetUp;
  order.bytes = bytes;
  return team_->Do(order);
}

absl::Status Contender::TearDown() { return team_->Do(Phase::kTearDown); }

std::int64_t Contender::HelpersCpuNs() const {
  std::int64_t cpu_ns = team_->LauncherCpuNs();
  if (servers_ == nullptr) return cpu_ns;
  for (const ChildProcess& server : *servers_) cpu_ns += ProcessCpuNs(server.pid());
  return cpu_ns;
}

absl::StatusOr<Turn> Contender::Take(std::uint64_t iteration, bool check_all) {
  absl::Status status = team_->Do(Phase::kFill, iteration);
  if (!status.ok()) return status;
  const std::int64_t cpu_ns = HelpersCpuNs();
  absl::StatusOr<Turn> turn = Reduce(iteration);
  if (!turn.ok()) return turn;
  turn->cpu_ns += HelpersCpuNs() - cpu_ns;
  status = team_->Do(Phase::kCheck, iteration, check_all);
  if (!status.ok()) return status;
  for (std::uint32_t rank = 0; rank < team_->ranks(); ++rank) {
    turn->wrong += team_->report(rank).wrong;
  }
  return turn;
}

absl::StatusOr<Turn> Contender::Reduce(std::uint64_t iteration) {
  const absl::Status status = team_->Do(Phase::kCall, iteration);
  if (!status.ok()) return status;
  Turn turn;
  std::uint32_t last = 0;
  for (std::uint32_t rank = 0; rank < team_->ranks(); ++rank) {
    const RankReport& report = team_->report(rank);
    if (report.call_ns > team_->report(last).call_ns) last = rank;
    turn.mark_ns[rank] = report.handoff.marked_ns - report.call_ns;
    turn.enqueue_ns[rank] = report.handoff.enqueued_ns - report.call_ns;
    turn.host_synchronizations += report.handoff.host_synchronizations;
    turn.cpu_ns += report.cpu_ns;
  }
  const RankReport& report = team_->report(last);
  const HandoffTimes& handoff = report.handoff;
  turn.time_ns = report.return_ns - report.call_ns;
  // What rank 0 does alone.
  const std::int64_t gpu_ns = team_->report(0).handoff.gpu_ns;
  if (gpu_ns > 0) turn.time_ns = gpu_ns;
  turn.stages_ns = {handoff.ready_ns - report.call_ns, handoff.start_ns - handoff.ready_ns,
                    handoff.finish_ns - handoff.start_ns, report.return_ns - handoff.finish_ns};
  return turn;
}

}  // namespace gradsync::bench
