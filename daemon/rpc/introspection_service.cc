#include "daemon/rpc/introspection_service.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/rpc/cuda_status.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "gradsync/v1/introspection.grpc.pb.h"

namespace gradsync {
namespace {

constexpr std::uint32_t kMaxTimelineSteps = 64;
constexpr double kNsPerSecond = 1e9;
// For workers to say what memory they have.
constexpr absl::Duration kWorkerPatience = absl::Milliseconds(200);

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

double Seconds(std::uint64_t from_ns, std::uint64_t to_ns) {
  return to_ns > from_ns ? static_cast<double>(to_ns - from_ns) / kNsPerSecond : 0;
}

void Fill(const Session& session, std::uint64_t now_ns, v1::SessionStatus* out) {
  const SessionIdentity& identity = session.identity();
  out->set_rank(identity.rank);
  out->set_incarnation(identity.incarnation);
  out->set_pid(identity.peer.pid);
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

void FillRanks(const std::vector<std::uint32_t>& ranks,
               const std::vector<std::uint32_t>& waiting_ranks, v1::NodeStatus* out) {
  for (const std::uint32_t rank : ranks) {
    out->add_ranks(rank);
    if (std::binary_search(waiting_ranks.begin(), waiting_ranks.end(), rank)) {
      out->add_waiting_ranks(rank);
    }
  }
}

// The nodes of a job that spans some.
void FillNodes(const JobSnapshot& job, const JobNodes& nodes, const std::string& here,
               std::uint64_t now_ns, v1::JobStatus* out) {
  std::map<std::string, std::vector<std::uint32_t>> gone;  // by node
  for (const RankSnapshot& rank : job.former_ranks) {
    const auto is_its = [&rank](const NodeSnapshot& node) { return node.name == rank.node; };
    if (rank.node.empty() || std::any_of(nodes.others.begin(), nodes.others.end(), is_its)) {
      continue;
    }
    gone[rank.node].push_back(rank.rank);
  }
  if (nodes.others.empty() && gone.empty()) return;
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
  for (const auto& [name, ranks] : gone) {
    v1::NodeStatus* const lost = out->add_nodes();
    lost->set_name(name);
    FillRanks(ranks, {}, lost);
  }
  if (nodes.engine.has_value()) Fill(*nodes.engine, out->mutable_engine());
}

void Fill(const LatencySnapshot& latency, v1::Latency* out) {
  out->set_p50_us(latency.p50_us);
  out->set_p99_us(latency.p99_us);
  out->set_max_us(latency.max_us);
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

class IntrospectionService final : public v1::Introspection::Service {
 public:
  explicit IntrospectionService(IntrospectionContext context) : context_(std::move(context)) {}

  grpc::Status GetStatus(grpc::ServerContext* call, const v1::GetStatusRequest* request,
                         v1::GetStatusResponse* response) override {
    const std::uint64_t now_ns = context_.clock->NowNs();
    response->set_version(context_.version);
    response->set_pid(static_cast<std::uint32_t>(getpid()));
    response->set_uptime_s(Seconds(context_.started_ns, now_ns));
    response->set_socket(context_.socket);
    response->set_state(context_.sessions->draining() ? v1::DAEMON_STATE_DRAINING
                                                      : v1::DAEMON_STATE_SERVING);
    response->set_reduce_threads(context_.reduce_threads);
    response->set_simd(context_.simd);
    response->set_peer_address(context_.peer_address);
    response->set_node_name(context_.node_name);
    response->set_arena_bytes(context_.quota->total_bytes());
    *response->mutable_warnings() = {context_.warnings.begin(), context_.warnings.end()};
    *response->mutable_notices() = {context_.notices.begin(), context_.notices.end()};
    if (context_.workers != nullptr) FillCuda(call, request->job_id(), response);

    std::map<std::uint64_t, std::shared_ptr<Session>> sessions;  // by incarnation
    for (auto& session : context_.sessions->Sessions()) {
      sessions[session->identity().incarnation] = std::move(session);
    }
    for (const auto& job : Visible(call, request->job_id())) {
      const JobSnapshot snapshot = job->Snapshot();
      v1::JobStatus* out = response->add_jobs();
      out->set_job_id(job->identity().job_id);
      out->set_uid(job->identity().uid);
      out->set_generation(job->identity().generation);
      out->set_world_size(job->world_size());
      out->set_state(StateOf(snapshot.phase));
      out->set_failure(snapshot.failure);
      *out->mutable_missing_ranks() = {snapshot.missing_ranks.begin(),
                                       snapshot.missing_ranks.end()};
      for (const RankSnapshot& rank : snapshot.ranks) {
        v1::SessionStatus* session = out->add_sessions();
        session->set_rank(rank.rank);
        session->set_incarnation(rank.incarnation);
        session->set_state(rank.left ? "left" : "live");
        session->set_node(rank.node);
        const auto found = sessions.find(rank.incarnation);
        if (found == sessions.end()) continue;
        Fill(*found->second, now_ns, session);
        Warn(out->job_id(), *found->second, *session, response);
      }
      for (const LayoutSnapshot& layout : snapshot.layouts) Fill(layout, out->add_layouts());
      if (snapshot.phase == JobPhase::kRunning) out->set_gate(GateOf(job->identity()));
      if (context_.nodes == nullptr || snapshot.phase == JobPhase::kFailed ||
          snapshot.phase == JobPhase::kEnded) {
        continue;
      }
      FillNodes(snapshot, context_.nodes->NodesOf(*job), context_.node_name, now_ns, out);
    }
    if (context_.nodes == nullptr) return grpc::Status::OK;
    for (const RemoteJobSnapshot& job : context_.nodes->RemoteJobs()) {
      if (!IsVisible(call, job.uid, job.job_id, request->job_id())) continue;
      v1::RemoteJobStatus* out = response->add_remote_jobs();
      out->set_job_id(job.job_id);
      out->set_uid(job.uid);
      out->set_coordinator(job.coordinator);
      out->set_node_name(job.node_name);
      out->set_connected(job.connected);
      out->set_heard_s(Seconds(job.heard_ns, now_ns));
      if (job.engine.has_value()) Fill(*job.engine, out->mutable_engine());
      for (const std::uint64_t incarnation : job.incarnations) {
        const auto found = sessions.find(incarnation);
        if (found == sessions.end()) continue;
        v1::SessionStatus* session = out->add_sessions();
        Fill(*found->second, now_ns, session);
        session->set_state("live");
        Warn(out->job_id(), *found->second, *session, response);
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status GetStats(grpc::ServerContext* call, const v1::GetStatsRequest* request,
                        v1::GetStatsResponse* response) override {
    response->set_sessions_opened(context_.sessions->opened());
    response->set_sessions_lost(context_.sessions->lost());
    response->set_jobs_failed(context_.jobs->jobs_failed());
    for (const auto& job : Visible(call, request->job_id())) {
      const JobSnapshot snapshot = job->Snapshot();
      v1::JobStats* out = response->add_jobs();
      out->set_job_id(job->identity().job_id);
      out->set_uid(job->identity().uid);
      out->set_generation(job->identity().generation);
      out->set_operations(snapshot.operations);
      out->set_operations_failed(snapshot.operations_failed);
      for (const LayoutSnapshot& layout : snapshot.layouts) Fill(layout, out->add_layouts());
    }
    return grpc::Status::OK;
  }

  grpc::Status GetTimeline(grpc::ServerContext* call, const v1::GetTimelineRequest* request,
                           v1::GetTimelineResponse* response) override {
    const std::uint32_t steps = std::clamp<std::uint32_t>(request->steps(), 1, kMaxTimelineSteps);
    for (const auto& job : Visible(call, request->job_id())) {
      const auto timeline = job->Timeline(request->layout(), steps);
      if (!timeline.has_value()) continue;
      for (const StepTimes& times : *timeline) {
        v1::StepTimeline* out = response->add_steps();
        out->set_step(times.step);
        out->set_verdict(times.complete ? v1::VERDICT_COMPLETE : v1::VERDICT_VOID);
        out->set_commit_ns(times.commit_ns);
        Encode(times, out->mutable_buckets());
      }
      return grpc::Status::OK;
    }
    return ToGrpc(MakeError(absl::StatusCode::kNotFound, "UNKNOWN_LAYOUT",
                            absl::StrCat("no job '", request->job_id(), "' with a layout '",
                                         request->layout(), "'; GetStatus lists them")));
  }

 private:
  // The jobs that the caller may see, newest generations first as the table has them.
  std::vector<std::shared_ptr<Job>> Visible(grpc::ServerContext* call,
                                            const std::string& job_id) const {
    std::vector<std::shared_ptr<Job>> jobs;
    for (auto& job : context_.jobs->Jobs()) {
      const JobIdentity& identity = job->identity();
      if (IsVisible(call, identity.uid, identity.job_id, job_id)) jobs.push_back(std::move(job));
    }
    return jobs;
  }

  // To the caller, who asks for one job, or for all if `asked` is empty.
  bool IsVisible(grpc::ServerContext* call, uid_t uid, const std::string& job_id,
                 const std::string& asked) const {
    if (!asked.empty() && job_id != asked) return false;
    const auto peer = context_.connections->Find(call->peer());
    return peer.has_value() && (peer->uid == 0 || peer->uid == geteuid() || peer->uid == uid);
  }

  // In force between the job's GPUs; empty if there is nothing between any.
  std::string GateOf(const JobIdentity& job) const {
    const JobKey key{job.uid, job.job_id, job.token_hash};
    const auto gate = context_.gpu_reducer->GateOf(key.Text());
    if (!gate.has_value()) return "";
    return *gate == CollectiveGate::kNone ? "none" : "all_nodes";
  }

  void FillCuda(grpc::ServerContext* call, const std::string& job_id,
                v1::GetStatusResponse* response) const {
    const auto workers = context_.workers->Workers(kWorkerPatience);
    v1::CudaStatus* const out = response->mutable_cuda();
    *out = CudaStatusOf(context_.workers->Found(), workers);
    out->set_arena_bytes(context_.gpu_quota->total_bytes());
    out->set_gate(context_.gate);
    for (const WorkerStatus& worker : workers) {
      if (!IsVisible(call, worker.key.uid, worker.key.job_id, job_id)) continue;
      *out->add_workers() = WorkerStatusOf(worker);
    }
  }

  // Of a rank here: `status` is what is said of it.
  static void Warn(const std::string& job_id, const Session& session,
                   const v1::SessionStatus& status, v1::GetStatusResponse* response) {
    if (session.identity().peer.pidfd == nullptr) {
      response->add_warnings(absl::StrCat(
          "job ", job_id, " rank ", session.rank(),
          ": pid unknown (another PID namespace); its death is known by its stream alone"));
    }
    for (std::string& warning : MpsWarnings(job_id, status, response->cuda())) {
      response->add_warnings(std::move(warning));
    }
  }

  const IntrospectionContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeIntrospectionService(IntrospectionContext context) {
  return std::make_unique<IntrospectionService>(std::move(context));
}

}  // namespace gradsync
