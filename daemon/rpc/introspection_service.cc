#include "daemon/rpc/introspection_service.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "gradsync/v1/introspection.grpc.pb.h"

namespace gradsync {
namespace {

constexpr std::uint32_t kMaxTimelineSteps = 64;
constexpr double kNsPerSecond = 1e9;

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
    response->set_uptime_s(static_cast<double>(now_ns - context_.started_ns) / kNsPerSecond);
    response->set_socket(context_.socket);
    response->set_state(context_.sessions->draining() ? v1::DAEMON_STATE_DRAINING
                                                      : v1::DAEMON_STATE_SERVING);
    response->set_reduce_threads(context_.reduce_threads);
    response->set_simd(context_.simd);
    response->set_peer_address(context_.peer_address);
    response->set_node_name(context_.node_name);
    response->set_arena_bytes(context_.quota->total_bytes());
    for (const std::string& warning : context_.warnings) response->add_warnings(warning);

    std::map<std::uint64_t, std::shared_ptr<Session>> sessions;
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
        const SessionIdentity& identity = found->second->identity();
        session->set_pid(identity.peer.pid);
        session->set_client(identity.client);
        session->set_connected_s(static_cast<double>(now_ns - identity.opened_ns) / kNsPerSecond);
        session->set_arena_bytes(found->second->memory_bytes());
        if (identity.peer.pidfd == nullptr) {
          response->add_warnings(absl::StrCat(
              "job ", out->job_id(), " rank ", rank.rank,
              ": pid unknown (another PID namespace); its death is known by its stream alone"));
        }
      }
      for (const LayoutSnapshot& layout : snapshot.layouts) Fill(layout, out->add_layouts());
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
    const auto peer = context_.connections->Find(call->peer());
    if (!peer.has_value()) return jobs;
    const bool sees_all = peer->uid == 0 || peer->uid == geteuid();
    for (auto& job : context_.jobs->Jobs()) {
      if (!sees_all && job->identity().uid != peer->uid) continue;
      if (!job_id.empty() && job->identity().job_id != job_id) continue;
      jobs.push_back(std::move(job));
    }
    return jobs;
  }

  const IntrospectionContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeIntrospectionService(IntrospectionContext context) {
  return std::make_unique<IntrospectionService>(std::move(context));
}

}  // namespace gradsync
