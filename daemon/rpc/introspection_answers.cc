#include "daemon/rpc/introspection_answers.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/rpc/cuda_status.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/job_status.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// Time that workers have to report their memory.
constexpr absl::Duration kWorkerPatience = absl::Milliseconds(200);

JobKey KeyOf(const JobIdentity& job) { return {job.uid, job.job_id, job.token_hash}; }

// Whether an asker that does not see all sees what belongs to `owner`: its own, and as root in a
// pod, everything in this pod.
bool SeesWhatIsOf(const Tenant& owner, const ClientProcess& asker) {
  const bool sees_pod = asker.uid == 0 && asker.place.kind == PodPlace::Kind::kPod;
  return owner.pod == asker.place.pod && (owner.uid == asker.uid || sees_pod);
}

// Adds warnings of a rank on this node. `status` is its entry.
void Warn(const std::string& job_id, const Session& session, const v1::SessionStatus& status,
          v1::GetStatusResponse* response) {
  if (session.identity().process.pidfd == nullptr) {
    response->add_warnings(absl::StrCat(
        "job ", job_id, " rank ", session.rank(),
        ": pid unknown (another PID namespace); only the end of its stream shows its end"));
  }
  for (std::string& warning : MpsWarnings(job_id, status, response->cuda())) {
    response->add_warnings(std::move(warning));
  }
}

}  // namespace

v1::GetStatusResponse IntrospectionAnswers::Status(const ClientProcess& asker,
                                                   const v1::GetStatusRequest& request) const {
  v1::GetStatusResponse answer;
  v1::GetStatusResponse* const response = &answer;
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
  FillUsers(asker, response);

  std::map<std::uint64_t, std::shared_ptr<Session>> sessions;  // by incarnation
  for (auto& session : context_.sessions->Sessions()) {
    sessions[session->identity().incarnation] = std::move(session);
  }
  const bool sees_all = SeesAll(asker);
  const std::vector<std::shared_ptr<Job>> jobs = Visible(asker, request.job_id());
  if (context_.workers != nullptr) {
    std::set<std::string> keys;
    for (const auto& job : jobs) keys.insert(KeyOf(job->identity()).Text());
    // Jobs that other nodes coordinate count, too.
    for (const auto& [incarnation, session] : sessions) {
      const SessionIdentity& identity = session->identity();
      if (SeesWhatIsOf(identity.process.tenant(), asker)) keys.insert(identity.job_key);
    }
    FillCuda(sees_all ? nullptr : &keys, request.job_id(), response);
  }
  for (const auto& job : jobs) {
    const JobSnapshot snapshot = job->Snapshot();
    v1::JobStatus* out = response->add_jobs();
    out->set_job_id(job->identity().job_id);
    out->set_uid(job->identity().uid);
    out->set_generation(job->identity().generation);
    out->set_world_size(job->world_size());
    out->set_state(StateOf(snapshot.phase));
    out->set_failure(snapshot.failure);
    *out->mutable_missing_ranks() = {snapshot.missing_ranks.begin(), snapshot.missing_ranks.end()};
    out->set_missing_ranks_total(snapshot.missing_ranks_total);
    *out->mutable_held_ranks() = {snapshot.held_ranks.begin(), snapshot.held_ranks.end()};
    if (snapshot.healing.has_value()) Fill(*snapshot.healing, out->mutable_healing());
    for (const RankSnapshot& rank : snapshot.ranks) {
      v1::SessionStatus* session = out->add_sessions();
      session->set_rank(rank.rank);
      session->set_incarnation(rank.incarnation);
      session->set_state(StateOf(rank.state));
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
  if (context_.nodes == nullptr) return answer;
  const auto sees_rank = [&](std::uint64_t incarnation) {
    const auto found = sessions.find(incarnation);
    return found != sessions.end() &&
           SeesWhatIsOf(found->second->identity().process.tenant(), asker);
  };
  const auto wanted = [&](const RemoteJobOwners& job) {
    if (!request.job_id().empty() && job.job_id != request.job_id()) return false;
    // A job without ranks here waits for the next ones. Nobody in a pod sees it.
    const bool idle = job.incarnations.empty() && asker.place.pod.none() && job.uid == asker.uid;
    return sees_all || idle ||
           std::any_of(job.incarnations.begin(), job.incarnations.end(), sees_rank);
  };
  for (const RemoteJobSnapshot& job : context_.nodes->RemoteJobs(wanted)) {
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
      session->set_state(StateOf(RankState::kLive));
      Warn(out->job_id(), *found->second, *session, response);
    }
  }
  return answer;
}

v1::GetStatsResponse IntrospectionAnswers::Stats(const ClientProcess& asker,
                                                 const v1::GetStatsRequest& request) const {
  v1::GetStatsResponse answer;
  v1::GetStatsResponse* const response = &answer;
  response->set_sessions_opened(context_.sessions->opened());
  response->set_sessions_lost(context_.sessions->lost());
  response->set_jobs_failed(context_.jobs->jobs_failed());
  for (const auto& job : Visible(asker, request.job_id())) {
    const JobSnapshot snapshot = job->Snapshot();
    v1::JobStats* out = response->add_jobs();
    out->set_job_id(job->identity().job_id);
    out->set_uid(job->identity().uid);
    out->set_generation(job->identity().generation);
    out->set_operations(snapshot.operations);
    out->set_operations_failed(snapshot.operations_failed);
    for (const LayoutSnapshot& layout : snapshot.layouts) Fill(layout, out->add_layouts());
    for (const LayoutSnapshot& layout : snapshot.released_layouts) {
      Fill(layout, out->add_layouts());
    }
  }
  return answer;
}

absl::StatusOr<v1::GetTimelineResponse> IntrospectionAnswers::Timeline(
    const ClientProcess& asker, const v1::GetTimelineRequest& request) const {
  v1::GetTimelineResponse answer;
  v1::GetTimelineResponse* const response = &answer;
  const std::uint32_t steps = std::clamp<std::uint32_t>(request.steps(), 1, kMaxTimelineSteps);
  for (const auto& job : Visible(asker, request.job_id())) {
    const auto timeline = job->Timeline(request.layout(), steps);
    if (!timeline.has_value()) continue;
    for (const StepTimes& times : *timeline) {
      v1::StepTimeline* out = response->add_steps();
      out->set_step(times.step);
      out->set_verdict(times.complete ? v1::VERDICT_COMPLETE : v1::VERDICT_VOID);
      out->set_commit_ns(times.commit_ns);
      Encode(times, out->mutable_buckets());
    }
    return answer;
  }
  return MakeError(absl::StatusCode::kNotFound, reason::kUnknownLayout,
                   absl::StrCat("no job '", request.job_id(), "' with a layout '", request.layout(),
                                "'; GetStatus lists them"));
}

bool IntrospectionAnswers::SeesAll(const ClientProcess& asker) const {
  if (asker.uid != 0 && asker.uid != geteuid()) return false;
  if (context_.pod_root_sees_all) return true;
  switch (asker.place.kind) {
    case PodPlace::Kind::kUnknown:
      return false;
    case PodPlace::Kind::kNode:
      return true;
    case PodPlace::Kind::kPod:
      return asker.place.pod == context_.pod;
  }
  return false;
}

std::vector<std::shared_ptr<Job>> IntrospectionAnswers::Visible(const ClientProcess& asker,
                                                                const std::string& job_id) const {
  const bool sees_all = SeesAll(asker);
  const PodId& pod = asker.place.pod;
  std::vector<std::shared_ptr<Job>> jobs;
  for (auto& job : context_.jobs->Jobs()) {
    const JobIdentity& identity = job->identity();
    if (!job_id.empty() && identity.job_id != job_id) continue;
    const bool sees_it = SeesWhatIsOf(Tenant(identity.uid, pod), asker) && job->HasRankIn(pod);
    if (sees_all || sees_it) jobs.push_back(std::move(job));
  }
  return jobs;
}

std::string IntrospectionAnswers::GateOf(const JobIdentity& job) const {
  if (context_.gpu_reducer == nullptr) return "";
  const auto gate = context_.gpu_reducer->GateOf(KeyOf(job).Text());
  if (!gate.has_value()) return "";
  return *gate == CollectiveGate::kNone ? "none" : "all_nodes";
}

void IntrospectionAnswers::FillUsers(const ClientProcess& asker,
                                     v1::GetStatusResponse* response) const {
  std::map<Tenant, v1::UserMemory> users;
  for (const auto& [user, bytes] : context_.quota->Users()) users[user].set_arena_bytes(bytes);
  for (const auto& [user, bytes] : context_.gpu_quota->Users()) users[user].set_gpu_bytes(bytes);
  for (const auto& [user, bytes] : context_.control_quota->Users()) {
    users[user].set_control_bytes(bytes);
  }
  for (const auto& [user, bytes] : context_.engine_quota->Users()) {
    users[user].set_engine_bytes(bytes);
  }
  const bool sees_all = SeesAll(asker);
  const auto sees = [&](const Tenant& user) { return sees_all || SeesWhatIsOf(user, asker); };
  if (context_.open_calls != nullptr) {
    for (const auto& [user, calls] : context_.open_calls(sees)) {
      if (calls > 0) users[user].set_calls(calls);
    }
  }
  std::map<Tenant, Connections::Usage> connections;
  if (context_.connections != nullptr) connections = context_.connections->Users();
  for (const auto& [user, usage] : connections) {
    if (usage.open > 0) users[user].set_connections(usage.open);
  }
  for (auto& [user, memory] : users) {
    if (!sees(user)) continue;
    if (const auto found = connections.find(user); found != connections.end()) {
      memory.set_connections_refused(found->second.refused);
    }
    memory.set_uid(user.uid);
    memory.set_pod(user.pod.Text());
    memory.set_control_quota_bytes(context_.control_quota->bytes_per_user());
    memory.set_engine_quota_bytes(context_.engine_quota->bytes_per_user());
    *response->add_users() = std::move(memory);
  }
}

void IntrospectionAnswers::FillCuda(const std::set<std::string>* jobs, const std::string& job_id,
                                    v1::GetStatusResponse* response) const {
  const auto workers = context_.workers->Workers(kWorkerPatience);
  v1::CudaStatus* const out = response->mutable_cuda();
  *out = CudaStatusOf(context_.workers->Found(), workers);
  out->set_arena_bytes(context_.gpu_quota->total_bytes());
  out->set_gate(context_.gate);
  for (const WorkerStatus& worker : workers) {
    if (!job_id.empty() && worker.key.job_id != job_id) continue;
    if (jobs != nullptr && jobs->count(worker.key.job) == 0) continue;
    *out->add_workers() = WorkerStatusOf(worker);
  }
}

}  // namespace gradsync::daemon
