#include "daemon/rpc/job_status.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/string_view.h"

namespace gradsync::daemon {
namespace {

constexpr double kNsPerSecond = 1e9;

void FillRanks(const std::vector<std::uint32_t>& ranks,
               const std::vector<std::uint32_t>& waiting_ranks, v1::NodeStatus* out) {
  for (const std::uint32_t rank : ranks) {
    out->add_ranks(rank);
    if (std::binary_search(waiting_ranks.begin(), waiting_ranks.end(), rank)) {
      out->add_waiting_ranks(rank);
    }
  }
}

void Fill(const LatencySnapshot& latency, v1::Latency* out) {
  out->set_p50_us(latency.p50_us);
  out->set_p99_us(latency.p99_us);
  out->set_max_us(latency.max_us);
}

}  // namespace

v1::JobState StateOf(JobPhase phase) {
  switch (phase) {
    case JobPhase::kForming:
      return v1::JOB_STATE_FORMING;
    case JobPhase::kRunning:
      return v1::JOB_STATE_RUNNING;
    case JobPhase::kFailed:
      return v1::JOB_STATE_FAILED;
    case JobPhase::kEnded:
      return v1::JOB_STATE_ENDED;
  }
  return v1::JOB_STATE_UNSPECIFIED;
}

const char* StateOf(RankState state) {
  switch (state) {
    case RankState::kLoading:
      return "loading";
    case RankState::kHealing:
      return "healing";
    case RankState::kStayed:
    case RankState::kExited:
      return "left";
    case RankState::kFinished:
      return "finished";
    case RankState::kAbsent:
    case RankState::kLive:
    case RankState::kHeld:
    case RankState::kLost:
      break;
  }
  return "live";
}

double Seconds(std::uint64_t from_ns, std::uint64_t to_ns) {
  return to_ns > from_ns ? static_cast<double>(to_ns - from_ns) / kNsPerSecond : 0;
}

void Fill(const Session& session, std::uint64_t now_ns, v1::SessionStatus* out) {
  const SessionIdentity& identity = session.identity();
  out->set_rank(identity.rank);
  out->set_incarnation(identity.incarnation);
  out->set_pid(identity.process.pid);
  out->set_pod(identity.process.place.pod.Text());
  out->set_client(identity.client);
  out->set_connected_s(Seconds(identity.opened_ns, now_ns));
  out->set_arena_bytes(session.memory_bytes());
  out->set_gpu_bytes(session.gpu_bytes());
  for (const Session::GpuUse& use : session.gpu_uses()) {
    v1::GpuUse* const line = out->add_gpu_uses();
    line->set_gpu(use.device);
    line->set_sharing(use.mps ? v1::GPU_SHARING_MPS : v1::GPU_SHARING_TIME_SLICED);
  }
}

void Fill(const EngineSnapshot& engine, v1::EngineStatus* out) {
  out->set_epoch(engine.epoch);
  *out->mutable_nodes() = {engine.node_names.begin(), engine.node_names.end()};
  out->set_chunk_bytes(engine.settings.chunk_bytes);
  out->set_wire_type(static_cast<v1::WireType>(engine.settings.wire));
  out->set_encrypted(engine.encrypted);
  out->set_connected(engine.statistics.has_value());
  if (!engine.statistics.has_value()) return;
  out->set_exchanges(engine.statistics->exchanges);
  for (const LaneStatistics& lane : engine.statistics->lanes) {
    v1::LaneStatus* line = out->add_lanes();
    line->set_bytes_sent(lane.bytes_sent);
    line->set_bytes_received(lane.bytes_received);
    line->set_chunks(lane.chunks);
    line->set_busy_s(static_cast<double>(lane.busy_ns) / kNsPerSecond);
    if (lane.busy_ns == 0) continue;
    // Bits per nanosecond.
    line->set_gbit_per_s(8 * static_cast<double>(lane.bytes_sent) /
                         static_cast<double>(lane.busy_ns));
  }
}

void FillNodes(const JobSnapshot& job, const JobNodes& nodes, const std::string& here,
               std::uint64_t now_ns, v1::JobStatus* out) {
  std::set<absl::string_view> connected;
  for (const NodeSnapshot& node : nodes.others) connected.insert(node.name);
  std::map<std::string, std::vector<std::uint32_t>> lost_ranks;  // by node
  for (const RankSnapshot& rank : job.former_ranks) {
    if (connected.count(rank.node) == 0) lost_ranks[rank.node].push_back(rank.rank);
  }
  out->set_former_ranks_unlisted(job.former_ranks_unlisted);
  if (nodes.others.empty() && lost_ranks.empty()) return;
  v1::NodeStatus* const own = out->add_nodes();
  own->set_name(here);
  own->set_connected(true);
  std::vector<std::uint32_t> own_ranks;
  for (const RankSnapshot& rank : job.ranks) {
    if (rank.node.empty()) own_ranks.push_back(rank.rank);
  }
  FillRanks(own_ranks, job.waiting_ranks, own);
  for (const NodeSnapshot& node : nodes.others) {
    v1::NodeStatus* const other = out->add_nodes();
    other->set_name(node.name);
    other->set_address(node.address);
    other->set_connected(true);
    other->set_heard_s(Seconds(node.heard_ns, now_ns));
    FillRanks(node.ranks, job.waiting_ranks, other);
  }
  for (const auto& [name, ranks] : lost_ranks) {
    v1::NodeStatus* const lost = out->add_nodes();
    lost->set_name(name);
    FillRanks(ranks, {}, lost);
  }
  if (nodes.engine.has_value()) Fill(*nodes.engine, out->mutable_engine());
}

void Fill(const HealingSnapshot& healing, v1::HealingStatus* out) {
  out->set_rank(healing.rank);
  out->set_source(healing.source);
  out->set_bytes(healing.bytes_moved);
  out->set_bytes_total(healing.bytes);
}

void Fill(const LayoutSnapshot& layout, v1::LayoutStatus* out) {
  out->set_name(layout.name);
  out->set_channel(layout.channel);
  out->set_fingerprint(layout.fingerprint);
  out->set_parameters(static_cast<std::uint32_t>(layout.parameters));
  out->set_buckets(static_cast<std::uint32_t>(layout.buckets));
  out->set_bytes(layout.bytes);
  out->set_step(layout.step);
  out->set_waiting_for(layout.waiting_for);
  out->set_ready(layout.ready);
}

void Fill(const LayoutSnapshot& layout, v1::LayoutStats* out) {
  const LayoutStatsSnapshot& stats = layout.stats;
  out->set_name(layout.name);
  out->set_steps_complete(stats.steps_complete);
  out->set_steps_void(stats.steps_void);
  out->set_buckets_reduced(stats.buckets_reduced);
  out->set_bytes_reduced(stats.bytes_reduced);
  Fill(stats.ready_skew, out->mutable_ready_skew());
  Fill(stats.queue, out->mutable_queue());
  Fill(stats.reduce, out->mutable_reduce());
  Fill(stats.total, out->mutable_total());
  Fill(stats.exposed, out->mutable_exposed());
  out->set_reduce_gbps(stats.reduce_gbps);
  out->set_gradient_norm(stats.gradient_norm);
  out->set_non_finite(stats.non_finite);
  out->set_steps_non_finite(stats.steps_non_finite);
  for (const StragglerSnapshot& straggler : stats.stragglers) {
    v1::Straggler* line = out->add_stragglers();
    line->set_rank(straggler.rank);
    line->set_times_last(straggler.times_last);
    line->set_behind_us_total(straggler.behind_us_total);
  }
}

}  // namespace gradsync::daemon
