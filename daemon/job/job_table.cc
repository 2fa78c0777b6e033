#include "daemon/job/job_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

namespace {

bool IsOf(const Job& job, const JobKey& key) {
  const JobIdentity& is = job.identity();
  return is.uid == key.uid && is.job_id == key.job_id && is.token_hash == key.token_hash;
}

}  // namespace

bool JobTable::HasCompletedLocked(const JobKey& key, std::uint32_t rank) const {
  if (const auto found = jobs_.find(key); found != jobs_.end()) {
    return found->second->HasCompleted(rank);
  }
  const Job* last = nullptr;
  for (const auto& old : retired_) {
    if (!IsOf(*old, key)) continue;
    if (last == nullptr || last->identity().generation < old->identity().generation) {
      last = old.get();
    }
  }
  return last != nullptr && last->HasCompleted(rank);
}

bool JobTable::IsHeldElsewhereLocked(const JobKey& key, std::uint32_t rank,
                                     const PodId& pod) const {
  return std::any_of(jobs_.begin(), jobs_.end(), [&](const auto& entry) {
    const JobKey& other = entry.first;
    return other.uid == key.uid && other.job_id == key.job_id &&
           entry.second->identity().pod == pod && entry.second->IsHeld(rank);
  });
}

bool JobTable::NoteOtherTokensLocked(const JobKey& key, Job* job) {
  bool is_new = false;
  for (auto it = jobs_.lower_bound(JobKey{key.uid, key.job_id, ""}); it != jobs_.end(); ++it) {
    const auto& [other_key, other] = *it;
    if (other_key.uid != key.uid || other_key.job_id != key.job_id) break;
    if (other.get() == job || other->HasEnded() || other->Empty()) continue;
    is_new = job->NoteOtherToken() || is_new;
    is_new = other->NoteOtherToken() || is_new;
  }
  return is_new;
}

absl::StatusOr<std::shared_ptr<Job>> JobTable::JobForLocked(const JobKey& key, std::uint32_t rank,
                                                            std::uint32_t world_size,
                                                            const JobOptions& options,
                                                            const RankPlace& place, NewJob* next,
                                                            JobList* superseded) {
  if (options.Holds() && HasCompletedLocked(key, rank)) {
    // gradsync.run looks for "rank N of job" and "has left the job": see found_its_work_done().
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kLeft,
                     absl::StrCat("rank ", rank, " of job '", key.job_id,
                                  "' has left the job, so "
                                  "this process has nothing to replace. With on_rank_loss=hold "
                                  "another run needs another job_id."),
                     {{field::kJob, key.job_id}, {field::kRank, rank}});
  }
  std::uint64_t generation = 1;
  std::shared_ptr<Job> current;
  bool goes_on = false;  // beside the next generation
  if (const auto found = jobs_.find(key); found != jobs_.end()) {
    current = found->second;
    if (current->Replaceable(rank)) return current;
    const RankState state = current->StateOf(rank);
    const bool free = state == RankState::kAbsent;
    // A full job has no free rank, whatever the rank and world size of the new session.
    const bool begin_next = current->HasEnded() || current->Empty() || current->Formed() ||
                            (!free && state != RankState::kLive);
    if (!begin_next) return current;
    generation = current->identity().generation + 1;
    // The rank came to a good end there. The others may still come to theirs.
    const bool at_good_end = state == RankState::kExited || state == RankState::kFinished;
    goes_on = current->Formed() && !current->HasEnded() && at_good_end;
  } else if (options.Holds() && IsHeldElsewhereLocked(key, rank, place.pod)) {
    // A job of its own would wait for the other ranks in vain.
    return MakeError(absl::StatusCode::kPermissionDenied, reason::kCredentials,
                     absl::StrCat("rank ", rank, " of job '", key.job_id,
                                  "' is lost and waits for a replacement, but this process has "
                                  "another job token. Start it with the job's GRADSYNC_JOB_TOKEN; "
                                  "another run needs another job_id."),
                     {{field::kJob, key.job_id}, {field::kRank, rank}});
  } else {
    // Retired jobs are in no order: a superseded generation may end later than its successor.
    for (const auto& old : retired_) {
      if (IsOf(*old, key)) generation = std::max(generation, old->identity().generation + 1);
    }
  }
  const JobIdentity identity{key.uid,    key.job_id, key.token_hash,
                             generation, place.pod,  place.origin};
  if (absl::Status may = CheckQuotaLocked(identity, current.get()); !may.ok()) return may;
  if (next->job == nullptr || next->job->identity().generation != generation) {
    auto charge = ChargeLocked(identity, Job::BytesFor(world_size));
    if (!charge.ok()) return charge.status();
    next->identity = identity;
    next->charge = *std::move(charge);
    return std::shared_ptr<Job>();
  }
  if (current != nullptr) {
    if (!goes_on) superseded->push_back(current);
    former_.push_back(std::move(current));
  }
  jobs_[key] = next->job;
  return std::move(next->job);
}

absl::Status JobTable::CheckQuotaLocked(const JobIdentity& identity, const Job* replaced) const {
  const Tenant user = identity.payer();
  std::size_t of_user = 0;
  for (const auto& [key, job] : jobs_) {
    if (job.get() != replaced && job->identity().payer() == user) ++of_user;
  }
  if (of_user < quota_jobs_per_user_) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kResourceExhausted, reason::kQuota,
      absl::StrCat("user ", user.Text(), " has ", of_user,
                   " jobs, as many as quota_jobs_per_user allows: end one, or raise the quota"),
      {{field::kJob, identity.job_id}});
}

void JobTable::FindFormerLocked(const JobKey& key, std::uint32_t rank, JobList* superseded) const {
  for (const auto& former : former_) {
    if (!IsOf(*former, key)) continue;
    const RankState state = former->StateOf(rank);
    if (TakesPart(state) || state == RankState::kStayed) superseded->push_back(former);
  }
}

absl::StatusOr<std::shared_ptr<Job>> JobTable::Join(
    const JobKey& key, std::uint32_t rank, std::uint32_t world_size, const JobOptions& options,
    std::uint64_t incarnation, std::shared_ptr<SessionSink> sink, const RankPlace& place) {
  // First, so that a rank that is refused ends no job.
  if (options.Holds() && !place.node.empty()) {
    return MakeError(absl::StatusCode::kUnimplemented, reason::kLossPolicy,
                     absl::StrCat("job '", key.job_id, "', rank ", rank, " on node ", place.node,
                                  ": on_rank_loss=hold needs every rank on one node; use abort"),
                     {{field::kJob, key.job_id}, {field::kRank, rank}});
  }
  // Until then they count, and the user is charged for what they keep.
  const Tenant user(key.uid, place.pod);
  RetireEmpty(&user);
  JobList superseded;
  NewJob next;
  absl::StatusOr<std::shared_ptr<Job>> job;
  absl::Status joined;
  bool other_token = false;
  for (;;) {
    {
      MutexLock lock(&mutex_);
      job = JobForLocked(key, rank, world_size, options, place, &next, &superseded);
      joined = job.status();
      if (!job.ok()) break;
      if (*job != nullptr) {
        joined = (*job)->Join(rank, world_size, options, incarnation, sink, place.node, place.pod);
        // Tries again if the job has failed between JobForLocked() and Join().
        if (!joined.ok() && (*job)->HasEnded()) continue;
        if (joined.ok()) {
          FindFormerLocked(key, rank, &superseded);
          other_token = NoteOtherTokensLocked(key, job->get());
        }
        break;
      }
    }
    // A large one takes milliseconds.
    next.job = std::make_shared<Job>(next.identity, world_size, options, environment_,
                                     std::move(next.charge));
  }
  if (other_token && environment_.log_other_token) {
    environment_.log_other_token(key.uid, key.job_id);
  }
  for (const auto& old : superseded) {
    old->End(MakeError(
        absl::StatusCode::kAborted, reason::kSuperseded,
        absl::StrCat("a newer generation of job '", key.job_id, "' was begun by rank ", rank,
                     "; this session belongs to the old one. Join again to take part."),
        {{field::kJob, key.job_id}, {field::kRank, rank}}));
  }
  if (!joined.ok()) return joined;
  return job;
}

void JobTable::Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
                    std::function<void(absl::StatusOr<Joined>)> joined) {
  auto job = Join(request.key, request.rank, request.world_size, request.options,
                  request.incarnation, std::move(sink), {/*node=*/"", request.pod, nullptr});
  if (!job.ok()) return joined(job.status());
  if (request.lacks_peers) (*job)->NoteNoPeers();
  const std::uint64_t generation = (*job)->identity().generation;
  joined(Joined{*std::move(job), generation});
}

absl::StatusOr<ArenaQuota::Reservation> JobTable::ChargeLocked(const JobIdentity& job,
                                                               std::uint64_t bytes) {
  const MemoryAccount account = job.AccountIn(environment_.memory);
  auto charge = account.Reserve(bytes);
  // What ended jobs keep counts for the user alone, not for an address.
  while (!charge.ok() && DetailsOf(charge.status()).Value(field::kAddress).empty() &&
         DropRetiredLocked(account.user, /*keep=*/0)) {
    charge = account.Reserve(bytes);
  }
  return charge;
}

bool JobTable::DropRetiredLocked(const Tenant& user, std::size_t keep) {
  auto oldest = retired_.end();
  std::size_t of_user = 0;
  for (auto it = retired_.begin(); it != retired_.end(); ++it) {
    if ((*it)->identity().payer() != user) continue;
    oldest = it;  // the newest are first
    ++of_user;
  }
  if (of_user <= keep) return false;
  retired_.erase(oldest);
  return true;
}

void JobTable::RetireLocked(std::shared_ptr<Job> job) {
  jobs_failed_ += job->HasEnded() ? 1 : 0;
  const Tenant user = job->identity().payer();
  job->Retire();
  retired_.push_front(std::move(job));
  DropRetiredLocked(user, kRetiredPerUser);
  std::uint64_t bytes = 0;
  for (const auto& one : retired_) bytes += one->charged_bytes();
  while (retired_.size() > kRetired || (retired_.size() > 1 && bytes > kRetiredBytes)) {
    bytes -= retired_.back()->charged_bytes();
    retired_.pop_back();
  }
}

void JobTable::RetireEmpty(const Tenant* user) {
  JobList empty;
  for (auto& job : Live()) {
    const bool asked = user == nullptr || job->identity().payer() == *user;
    if (asked && job->Empty()) empty.push_back(std::move(job));
  }
  if (empty.empty()) return;
  MutexLock lock(&mutex_);
  for (auto& job : empty) {
    // Still: with policy `hold` a rank may have come back meanwhile.
    if (job->Empty() && RemoveLocked(*job)) RetireLocked(std::move(job));
  }
}

bool JobTable::RemoveLocked(const Job& job) {
  const auto is_it = [&job](const std::shared_ptr<Job>& other) { return other.get() == &job; };
  if (const auto found = std::find_if(former_.begin(), former_.end(), is_it);
      found != former_.end()) {
    former_.erase(found);
    return true;
  }
  const JobIdentity& identity = job.identity();
  const auto found = jobs_.find(JobKey{identity.uid, identity.job_id, identity.token_hash});
  if (found == jobs_.end() || !is_it(found->second)) return false;
  jobs_.erase(found);
  return true;
}

void JobTable::Tick() {
  for (const auto& job : Live()) job->Tick();
  RetireEmpty(/*user=*/nullptr);
}

std::vector<std::shared_ptr<Job>> JobTable::Live() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Job>> jobs;
  for (const auto& entry : jobs_) jobs.push_back(entry.second);
  jobs.insert(jobs.end(), former_.begin(), former_.end());
  return jobs;
}

void JobTable::EndAll(const absl::Status& why) {
  for (const auto& job : Live()) job->End(why);
}

bool JobTable::EndIdle(const absl::Status& why) {
  bool all = true;
  for (const auto& job : Live()) all = job->EndIfIdle(why) && all;
  return all;
}

std::vector<std::shared_ptr<Job>> JobTable::Jobs() const {
  std::vector<std::shared_ptr<Job>> jobs = Live();
  MutexLock lock(&mutex_);
  jobs.insert(jobs.end(), retired_.begin(), retired_.end());
  return jobs;
}

std::uint64_t JobTable::jobs_failed() const {
  MutexLock lock(&mutex_);
  return jobs_failed_;
}

}  // namespace gradsync::daemon
