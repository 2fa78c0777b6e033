// All sessions of the daemon: who may open one, the nonces that bring their memory, their leases.
//
// Thread-safe. Lock order: SessionTable::mutex_ is taken before none: jobs and sessions are called
// outside it.

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
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_table.h"
#include "daemon/session/session.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync {

struct SessionPolicy {
  bool require_token = false;
  bool allow_overflow_uid = false;
  std::uint64_t lease_ns = 30'000'000'000;
  std::uint64_t step_timeout_ns = 1'800'000'000'000;
  std::uint64_t staging_bytes = 32u << 20;
  std::size_t quota_sessions_per_user = 256;
  std::size_t quota_layouts_per_session = 64;
};

// A decoded and validated OpenSession.
struct OpenRequest {
  std::string job_id;
  std::string token;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  bool divide_by_world = false;
  std::uint64_t step_timeout_ns = 0;  // 0: the policy's
  NcclSettings nccl;
  std::string client;
  std::string coordinator;  // where rank 0's daemon is; empty: here
};

using Nonce = std::string;  // kNonceBytes bytes

class SessionTable {
 public:
  // `jobs`, `quota`, `executor` and `clock` outlive the table.
  SessionTable(const SessionPolicy& policy, JobTable* jobs, ArenaQuota* quota, Executor* executor,
               const Clock* clock);

  const SessionPolicy& policy() const { return policy_; }

  // Layouts may lie on GPUs from now on. Before the first session.
  void UseGpus(const GpuMemory& gpus) { gpus_ = gpus; }
  // Called for each trainer that is lost though its process lives, and that has had memory on a
  // GPU, to keep it from there. Before the first session.
  void FenceWith(std::function<void(const PeerProcess&)> fence) { fence_ = std::move(fence); }
  // The sessions whose memory was in that worker end.
  void WorkerLost(const WorkerKey& key, const absl::Status& why);

  // From now on sessions join through `finder`, which outlives them, rather than through `jobs`: a
  // job may be on another node, and more ranks in it than on this one. Before the first session.
  void JoinThrough(JobFinder* finder) { finder_ = finder; }

  // `opened` is called once: before this returns, unless the job is on another node. Messages to
  // `sink` may come before it. Statuses as in gradsync.proto, GradientSync.Session.
  using Opened = std::function<void(absl::StatusOr<std::shared_ptr<Session>>)>;
  void Open(const PeerProcess& peer, const OpenRequest& request, std::shared_ptr<SessionSink> sink,
            Opened opened);

  // A nonce, valid once, for 60 s and as long as the descriptors' owners live, that brings these in
  // order to the session's own process. It keeps no owner: what is never claimed, because an
  // agreement has failed meanwhile, is freed with it.
  struct Descriptor {
    std::shared_ptr<void> owner;  // keeps `fd` open
    int fd = -1;
  };
  // ABORTED SESSION_ENDED: nobody is left to claim it.
  absl::StatusOr<Nonce> Offer(const Session& session, const std::vector<Descriptor>& descriptors);
  // NOT_FOUND: unknown, used, expired or freed; PERMISSION_DENIED: another process's.
  absl::StatusOr<std::vector<Descriptor>> Claim(const Nonce& nonce, const PeerProcess& peer);

  // The session's stream has ended, or its process has. Takes the caller's reference: the last one
  // goes on the executor, which frees the memory.
  void Gone(std::shared_ptr<Session> session, const absl::Status& why);
  void Tick();
  // From now on Open fails UNAVAILABLE DRAINING.
  void Drain();
  bool draining() const;

  std::vector<std::shared_ptr<Session>> Sessions() const;
  std::uint64_t opened() const;
  std::uint64_t lost() const;

 private:
  struct Offered {
    std::uint64_t incarnation = 0;
    uid_t uid = 0;
    pid_t pid = 0;
    std::uint64_t expires_ns = 0;
    std::vector<std::pair<std::weak_ptr<void>, int>> descriptors;
  };

  // Whether this one may come; its number.
  absl::StatusOr<std::uint64_t> Admit(const PeerProcess& peer, const OpenRequest& request);
  // Notes the session, or that it did not come to be.
  void Note(const PeerProcess& peer, const absl::StatusOr<std::shared_ptr<Session>>& session);

  const SessionPolicy policy_;
  JobTable* const jobs_;
  JobFinder* finder_ = nullptr;  // or jobs_; constant once sessions come
  ArenaQuota* const quota_;
  Executor* const executor_;
  const Clock* const clock_;
  GpuMemory gpus_;
  std::function<void(const PeerProcess&)> fence_;

  mutable Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mutex_);
  std::map<uid_t, std::size_t> per_user_ ABSL_GUARDED_BY(mutex_);
  std::map<Nonce, Offered> offers_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t opened_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t lost_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync

#endif  // DAEMON_SESSION_SESSION_TABLE_H_
