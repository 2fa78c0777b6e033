// All sessions of the daemon: admits them, hands out their memory for nonces, and checks their
// leases.
//
// It shares each session with the session's stream until the session has ended.
//
// Thread-safe. Jobs and sessions are called without SessionTable::mutex_.

#ifndef DAEMON_SESSION_SESSION_TABLE_H_
#define DAEMON_SESSION_SESSION_TABLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/job_table.h"
#include "daemon/session/session.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync::v1 {
class OpenSession;
}

namespace gradsync::daemon {

struct SessionPolicy {
  bool require_token = false;
  bool allow_overflow_uid = false;
  std::uint64_t lease_ns = 30'000'000'000;
  std::uint64_t step_timeout_ns = 1'800'000'000'000;
  std::uint64_t staging_bytes = 32u << 20;
  std::size_t quota_sessions_per_user = 256;
  std::size_t quota_layouts_per_session = 64;
  std::size_t turn_bytes = HostArena::kTurnBytes;  // SessionLimits::turn_bytes
};

// A decoded and validated OpenSession.
struct OpenRequest {
  std::string job_id;
  std::string token;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  JobOptions options;  // step_timeout_ns 0: the policy's
  std::string client;
  std::string coordinator;                         // address of rank 0's daemon; empty: this one
  std::uint64_t patience_ns = 0;                   // how long the rank waits for that daemon
  std::shared_ptr<const v1::OpenSession> message;  // the client's, if `coordinator` is not empty
};

using Nonce = std::string;  // kNonceBytes bytes

class SessionTable {
 public:
  // `jobs`, `quota`, `executor` and `clock` outlive the table.
  SessionTable(const SessionPolicy& policy, JobTable* jobs, ArenaQuota* quota,
               UserExecutor* executor, const Clock* clock);

  const SessionPolicy& policy() const { return policy_; }

  // Allows layouts on GPUs. Called before the first session.
  void UseGpus(const GpuMemory& gpus) { gpus_ = gpus; }
  // Bounds the descriptors of each user's sessions. Called before the first session.
  void LimitDescriptors(DescriptorQuota* quota) { descriptors_ = quota; }
  // Sets `fence`, which keeps a process off its GPU. The table calls it if a trainer with memory on
  // a GPU is lost and its process lives. Called before the first session.
  void FenceWith(std::function<void(const ClientProcess&)> fence) { fence_ = std::move(fence); }
  // A worker was lost: ends the sessions whose memory it held.
  void WorkerLost(const WorkerKey& key, const absl::Status& why);

  // Makes sessions join through `finder` instead of `jobs`: a job may span nodes, and another node
  // may coordinate it. `finder` outlives the sessions. Called before the first session.
  void JoinThrough(JobFinder* finder) { finder_ = finder; }

  // Opens a session. Calls `opened` once, before this returns unless another node coordinates the
  // job. `sink` may get messages before `opened` is called. gradsync.proto lists the statuses under
  // GradientSync.Session.
  using Opened = std::function<void(absl::StatusOr<std::shared_ptr<Session>>)>;
  void Open(const ClientProcess& process, const OpenRequest& request,
            std::shared_ptr<SessionSink> sink, Opened opened);

  // Returns a nonce for which the session's process can claim these descriptors, in this order,
  // once and within 60 s. A nonce does not keep the descriptors' owners alive: if an agreement
  // fails, its memory is freed even if nobody has claimed it. ABORTED SESSION_ENDED: the session
  // has ended.
  struct Descriptor {
    std::shared_ptr<void> owner;  // keeps `fd` open
    int fd = -1;
  };
  absl::StatusOr<Nonce> Offer(const Session& session, const std::vector<Descriptor>& descriptors);
  // NOT_FOUND: the nonce is unknown, used or expired, or its memory was freed. PERMISSION_DENIED:
  // it belongs to another process.
  absl::StatusOr<std::vector<Descriptor>> Claim(const Nonce& nonce, const ClientProcess& process);
  // How many nonces the table keeps. Each Offer() first drops the session's useless nonces. So a
  // session has at most one nonce for each memory that it had at its last Offer().
  std::size_t offers() const;

  // Ends the session: its stream or its process has ended. Takes the caller's reference, so that
  // the executor drops the last one and frees the memory.
  void End(std::shared_ptr<Session> session, const absl::Status& why);
  // The session's connection was closed without Leave: ends the session with `why`. Under the
  // policy `hold`, unless the daemon drains, the session first waits for the end of the process, so
  // that the job can hold the rank. A process that still lives one lease later is killed. If the
  // daemon may not kill it, or the job would not hold the rank, the session ends with `why`.
  void ConnectionClosed(std::shared_ptr<Session> session, const absl::Status& why);
  // The session has broken the protocol: ends it with `why`. If its rank is healing, and the job
  // would hold the rank, only this session ends, unless the daemon drains: its client hears `why`,
  // and the job holds the rank once the process has ended. A process that still lives one lease
  // later is treated as under ConnectionClosed().
  void EndForBreach(const std::shared_ptr<Session>& session, const absl::Status& why);
  // True if the session waits for its process to end: its connection was closed, its process was
  // killed, or it broke the protocol.
  bool IsClosed(const Session& session) const;
  void Tick();
  // Makes Open() fail with UNAVAILABLE DRAINING.
  void Drain();
  bool draining() const;

  std::vector<std::shared_ptr<Session>> Sessions() const;
  std::uint64_t opened() const;
  std::uint64_t lost() const;

 private:
  struct Offered {
    uid_t uid = 0;
    pid_t pid = 0;
    std::uint64_t expires_ns = 0;
    std::vector<std::pair<std::weak_ptr<void>, int>> descriptors;
  };

  // A session whose connection was closed, whose process was killed, or that has broken the
  // protocol. It waits for the end of the process.
  struct Closed {
    std::shared_ptr<Session> session;
    absl::Status why;
    std::uint64_t expires_ns = 0;
    bool killed = false;
  };

  // Ends the closed sessions whose process has ended. Kills a process whose time has expired. If it
  // cannot be killed, or was killed already, ends its session. `all`: ends every closed session.
  void EndClosed(bool all);
  // True if the process of this closed session has no other open session, and another process has
  // an open session of the job. So a process that still works for another job is not killed.
  bool MayBeKilled(const Session& session) const;
  // The session's time has expired. If the job would hold the rank once the process has ended,
  // kills the process, and returns true: the session ends with the process. It is killed because it
  // could write to its gradients later.
  bool KillToHold(const std::shared_ptr<Session>& session, const absl::Status& why);
  // Checks whether the session may open. Returns its incarnation.
  absl::StatusOr<std::uint64_t> Admit(const ClientProcess& process, const OpenRequest& request);
  // Ends the rank's old session if its process has ended. The new process may join before the
  // daemon notices that end.
  void EndIfProcessEnded(const JoinRequest& join);
  // Adds the session, or gives its quota back if it did not open.
  void Note(const ClientProcess& process, const absl::StatusOr<std::shared_ptr<Session>>& session);
  // Forgets the session's nonces that are of no use any more.
  void DropUselessOffersLocked(std::uint64_t incarnation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const SessionPolicy policy_;
  JobTable* const jobs_;
  JobFinder* finder_ = nullptr;  // jobs_ unless JoinThrough() was called; constant after that
  ArenaQuota* const quota_;
  UserExecutor* const executor_;
  const Clock* const clock_;
  GpuMemory gpus_;
  DescriptorQuota* descriptors_ = nullptr;
  std::function<void(const ClientProcess&)> fence_;

  mutable Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Closed> closed_ ABSL_GUARDED_BY(mutex_);  // of sessions_
  std::map<Tenant, std::size_t> per_user_ ABSL_GUARDED_BY(mutex_);
  std::map<Nonce, Offered> offers_ ABSL_GUARDED_BY(mutex_);
  // The nonces of each session of sessions_, by incarnation. Nonces that are not in offers_ any
  // more were claimed.
  std::map<std::uint64_t, std::vector<Nonce>> nonces_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t opened_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t lost_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_SESSION_SESSION_TABLE_H_
