// All jobs of the daemon, by key (uid, job_id, token hash), and their generations.
//
// The table holds each job until all of its sessions have ended. It keeps the last jobs that have
// ended, for status and statistics.
//
// Thread-safe. Lock order: JobTable::mutex_ -> Job::mutex_. Jobs are made, ticked and ended without
// the table's lock. Under the lock, a call asks only jobs of its own user, and empty jobs, which it
// retires. So other users do not wait while a job is busy.

#ifndef DAEMON_JOB_JOB_TABLE_H_
#define DAEMON_JOB_JOB_TABLE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/job/job.h"
#include "daemon/job/job_port.h"

namespace gradsync::daemon {

// Where a rank's process is.
struct RankPlace {
  std::string node = {};                           // empty: this one
  PodId pod = {};                                  // of the process, if it is on this node
  std::shared_ptr<MemoryOrigin> origin = nullptr;  // null: this node
};

class JobTable final : public JobFinder {
 public:
  // The objects of `environment` outlive the table.
  JobTable(const JobEnvironment& environment, std::size_t quota_jobs_per_user)
      : environment_(environment), quota_jobs_per_user_(quota_jobs_per_user) {}

  // Joins a rank to the key's job, and makes the job if there is none.
  //
  // Policy `abort`: a new generation begins if the job has been full or has ended, or the rank was
  // lost or has left. The old generation's sessions end ABORTED SUPERSEDED. Exception: if the rank
  // has left a full job for good, or finished, the old generation goes on until another of its
  // ranks joins the new one without having left the old one.
  //
  // Policy `hold`: a full job keeps its generation, and takes only a rank whose session is lost. A
  // rank that has left the job for good, or finished, is refused while the table remembers the job:
  // the session is a replacement that comes too late. A new session for a rank that stays
  // supersedes the job.
  //
  // Another token means another job. While ranks of one of these jobs are still to join, that job's
  // errors and notices mention the other token. Exception: while a full job holds a rank, a process
  // of the same user, id and pod is refused for that rank if its policy is `hold` and its token has
  // no job: it is a replacement with the wrong token.
  //   ALREADY_EXISTS       a live session has the rank, and the job is still forming or its policy
  //                        is `hold`.
  //   FAILED_PRECONDITION  world size or options differ from the ranks that joined before. LEFT:
  //                        with policy `hold`, the rank has left the job or has finished.
  //   PERMISSION_DENIED    CREDENTIALS: a job that holds this rank has another token.
  //   UNIMPLEMENTED        LOSS_POLICY: the policy is `hold`, and the rank is on another node.
  //   RESOURCE_EXHAUSTED   too many jobs of this user, or too much memory for them.
  absl::StatusOr<std::shared_ptr<Job>> Join(const JobKey& key, std::uint32_t rank,
                                            std::uint32_t world_size, const JobOptions& options,
                                            std::uint64_t incarnation,
                                            std::shared_ptr<SessionSink> sink,
                                            const RankPlace& place = {});

  // The same. Ignores the request's coordinator.
  void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
            std::function<void(absl::StatusOr<Joined>)> joined) override;

  // Checks the jobs' deadlines, and retires empty jobs.
  void Tick();
  void EndAll(const absl::Status& why);
  // Job::EndIfIdle() of every live job; true once all have ended.
  bool EndIdle(const absl::Status& why);
  // Live jobs, then the last jobs of each user that have ended, newest first. So a job's statistics
  // outlive its trainers.
  std::vector<std::shared_ptr<Job>> Jobs() const;
  std::uint64_t jobs_failed() const;

 private:
  // The most ended jobs that are kept, for one user and for all.
  static constexpr std::size_t kRetiredPerUser = 16;
  static constexpr std::size_t kRetired = 256;
  // The most bytes that all of them together are charged for. One alone may have more. Another
  // node's daemon can name many users, each with a job of 65,536 ranks.
  static constexpr std::uint64_t kRetiredBytes = std::uint64_t{128} << 20;

  using JobList = std::vector<std::shared_ptr<Job>>;

  // A job that the table does not have yet.
  struct NewJob {
    JobIdentity identity;
    ArenaQuota::Reservation charge;  // until the job is made
    std::shared_ptr<Job> job;        // null: to be made
  };

  // Returns the job that the rank joins. Null: a new job must begin, and `next` describes it. Then
  // the caller makes `next->job`, and calls again. That call makes `next->job` the key's job, and
  // returns it. It adds the job before it to `superseded`, unless that one goes on.
  absl::StatusOr<std::shared_ptr<Job>> JobForLocked(const JobKey& key, std::uint32_t rank,
                                                    std::uint32_t world_size,
                                                    const JobOptions& options,
                                                    const RankPlace& place, NewJob* next,
                                                    JobList* superseded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED QUOTA: the user has as many jobs as it may have. Does not count `replaced`,
  // which may be null.
  absl::Status CheckQuotaLocked(const JobIdentity& identity, const Job* replaced) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A job of the same user and id, begun in the same pod with another token, holds this rank.
  bool IsHeldElsewhereLocked(const JobKey& key, std::uint32_t rank, const PodId& pod) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells this job, and the live jobs of the same user and id with other tokens, about each other.
  // True if that is new to a job that is still forming.
  bool NoteOtherTokensLocked(const JobKey& key, Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Job::HasCompleted of the job's last generation.
  bool HasCompletedLocked(const JobKey& key, std::uint32_t rank) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds to `superseded` the earlier generations in which the rank still has a session.
  void FindFormerLocked(const JobKey& key, std::uint32_t rank, JobList* superseded) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<std::shared_ptr<Job>> Live() const;
  // Charges the user for a job, and the address of its first rank. Forgets retired jobs of the user
  // if the charge does not fit otherwise.
  absl::StatusOr<ArenaQuota::Reservation> ChargeLocked(const JobIdentity& job, std::uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the oldest retired job of the user. False, and nothing changes, if the user has `keep`
  // or fewer.
  bool DropRetiredLocked(const Tenant& user, std::size_t keep)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Retires the empty jobs of this user, or of all users (null).
  void RetireEmpty(const Tenant* user) ABSL_LOCKS_EXCLUDED(mutex_);
  // Removes the job from the live jobs. False: it is not one of them.
  bool RemoveLocked(const Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Keeps the job, which is empty, for status and statistics. Its other memory goes to the executor
  // before the lock is released.
  void RetireLocked(std::shared_ptr<Job> job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobEnvironment environment_;
  const std::size_t quota_jobs_per_user_;

  mutable Mutex mutex_;
  std::map<JobKey, std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);
  // Earlier generations. Some are superseded, but something may still touch their memory. Others go
  // on without a rank that has left them and joined the next generation.
  std::vector<std::shared_ptr<Job>> former_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Job>> retired_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t jobs_failed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_TABLE_H_
