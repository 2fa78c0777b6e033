// The memory and the steps of one rank of an agent. The coordinator may launch on this memory, and
// owes the rank a verdict for each step.

#ifndef DAEMON_PEER_AGENT_LAYOUTS_H_
#define DAEMON_PEER_AGENT_LAYOUTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/operation_channel.h"
#include "daemon/peer/worker_proxy_server.h"
#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync::daemon {

// Whether this node's plan of a layout has the same buckets as the coordinator's.
bool SameBuckets(const LayoutPlan& plan, const v1::LayoutAssigned& assigned);

// The end of a void step writes the done words of all buckets. The link's threads have other jobs
// to serve, so the executor writes these words, a part of them in each turn. No word ever
// decreases: if the next step launches a bucket before the executor has come to it, the bucket's
// word is written at once. If the layout ends, the words that are left are not written.
//
// Thread-safe. Keeps the memory until the layout or the rank has ended; then the executor frees it.
// `executor` outlives it. A shared_ptr owns it, because the executor's work keeps it alive. Lock
// order: AgentLayouts::mutex_, then only that of the executor's queue.
class AgentLayouts : public std::enable_shared_from_this<AgentLayouts> {
 public:
  AgentLayouts(const Tenant& user, std::uint32_t rank, UserExecutor* executor)
      : user_(user), rank_(rank), executor_(executor) {}

  // ---- The life of a layout
  // The coordinator has assigned its channel. `charge` is reduced to what the plan takes; may be
  // null. INVALID_ARGUMENT MALFORMED: another layout of the rank has or had this channel, or it is
  // 0. No channel may come twice: the session may still make calls for the earlier layout, and they
  // name only the channel.
  absl::Status Assign(const v1::LayoutAssigned& assigned, std::uint32_t replaces, LayoutPlan plan,
                      std::shared_ptr<ArenaQuota::Reservation> charge);
  // Keeps `memory`, which the rank has for the channel, or frees it if the layout has ended.
  void KeepMemory(std::uint32_t channel, std::shared_ptr<void> memory);
  // False: the layout has ended, because its agreement has just failed. FAILED_PRECONDITION
  // PROTOCOL_VIOLATION: the memory is not the kept one, or is too small for the plan.
  absl::StatusOr<bool> Mapped(std::uint32_t channel, RankMemory memory);
  // Ends the layout that this one replaces.
  void Ready(std::uint32_t channel);
  // The agreement has failed.
  void Failed(std::uint64_t request_id);
  // The rank gets no memory for the channel.
  void Refuse(std::uint32_t channel);
  // The rank has released the layout: ends it, as soon as every step that the rank has begun is
  // decided.
  void ReleaseLayout(std::uint32_t channel);
  void KeepStaging(StagingMemory staging);
  // Ends every layout. Later calls change nothing.
  void End();

  // ---- Its steps
  // The rank has marked `marks` more buckets of the step. With `end`, it has also ended the step.
  void NoteStep(std::uint32_t channel, std::uint64_t step, std::size_t marks, bool end);
  // The coordinator's verdict. If the step is void, releases the rank's waits for its buckets; with
  // many buckets, the last ones later.
  void StepDone(const v1::StepDone& done);
  // Every rank has left: steps go on from these numbers. Releases waits for earlier steps, as
  // above. INVALID_ARGUMENT MALFORMED: the message names more layouts than a job may have, names
  // one twice, or names a step 0. Then nothing changes.
  absl::Status Resume(const v1::LeaveDone& done);
  // True if the rank has sent EndStep and does not know the verdict. On a GPU it is enough that the
  // rank has marked every bucket: its streams may then have seen the verdict.
  bool InDoubt() const;
  // True if the rank has begun a step and does not know the verdict.
  bool InStep() const;

  // ---- The coordinator's launches
  struct LaunchMemory {
    std::byte* data = nullptr;
    std::shared_ptr<void> keep;
    std::shared_ptr<SemaphorePage> semaphores;  // null for staging memory
  };
  // The memory that a launch names. From now on only the launch writes its done word.
  // FAILED_PRECONDITION if the rank has no such memory.
  absl::StatusOr<LaunchMemory> MemoryOf(const v1::Launch& launch);
  // A bucket of an arena on a GPU. From now on only a launch of `step` writes its done word.
  // NOT_FOUND if the arena is not this rank's, FAILED_PRECONDITION if it has no such bucket.
  absl::StatusOr<ProxiedBucket> BucketOf(std::uint64_t arena, std::uint32_t bucket,
                                         std::uint64_t step);

 private:
  // The done words that the executor has yet to write. While there are any, it has one piece of
  // work for this layout.
  struct OwedWords {
    std::uint64_t step = 0;
    std::size_t next = 0;  // the next bucket; bucket 0 follows the last one
    std::size_t left = 0;  // buckets that are yet to come
    // By bucket: its word is written, and now belongs to a launch of a later step.
    std::vector<bool> launched;
  };
  struct Layout {
    std::uint64_t request_id = 0;
    std::uint32_t replaces = 0;
    LayoutPlan plan;
    std::shared_ptr<ArenaQuota::Reservation> charge;
    std::shared_ptr<void> kept;
    RankMemory memory;
    std::uint64_t begun_step = 0;    // the last step that the rank has begun
    std::size_t marks = 0;           // buckets of that step that it has marked
    std::uint64_t ended_step = 0;    // the last one for which it has sent EndStep
    std::uint64_t decided_step = 0;  // the last one with a verdict
    bool released = false;           // by the rank
    OwedWords owed;
  };
  using Layouts = std::map<std::uint32_t, Layout>;

  // False: the channel is 0 or was assigned before.
  bool TakeNumberLocked(std::uint32_t channel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Frees the layout's memory, and forgets the layout.
  void EraseLocked(Layouts::iterator layout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Writes `step` into the done words of all buckets, or has the executor do it. The layout has
  // memory.
  void SignalAllLocked(std::uint32_t channel, Layout* layout, std::uint64_t step)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One turn of the executor.
  void SignalSome(std::uint32_t channel) ABSL_LOCKS_EXCLUDED(mutex_);
  // `step` launches the bucket. From now on no earlier step writes its done word.
  static void NoteLaunch(Layout* layout, std::size_t bucket, std::uint64_t step);
  absl::Status WrongLaunch(absl::string_view what) const;

  const Tenant user_;
  const std::uint32_t rank_;
  UserExecutor* const executor_;

  mutable Mutex mutex_;
  Layouts layouts_ ABSL_GUARDED_BY(mutex_);                 // by channel
  std::uint32_t last_channel_ ABSL_GUARDED_BY(mutex_) = 0;  // the highest that was assigned
  // Lower ones that were not. Ranks may register layouts in different orders, so one of these may
  // still come.
  std::set<std::uint32_t> skipped_channels_ ABSL_GUARDED_BY(mutex_);
  StagingMemory staging_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_AGENT_LAYOUTS_H_
