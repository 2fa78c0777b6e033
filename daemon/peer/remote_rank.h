// A rank of this node in a job that another node coordinates: its session's port there. Holds the
// rank's memory for as long as the coordinator may launch something on it: until it says that the
// session has ended.

#ifndef DAEMON_PEER_REMOTE_RANK_H_
#define DAEMON_PEER_REMOTE_RANK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_port.h"
#include "daemon/peer/lent_workers.h"
#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync {

// Thread-safe. Lock order: RemoteRank::mutex_ is a leaf but for the sink's and the link's queues.
class RemoteRank final : public JobPort, public std::enable_shared_from_this<RemoteRank> {
 public:
  struct Context {
    std::function<void(v1::AttachRequest)> send;
    Executor* executor = nullptr;  // lets go of memory
    const Clock* clock = nullptr;
    std::size_t max_buckets = 4096;
    std::string coordinator;               // where it is
    std::shared_ptr<LentWorkers> workers;  // those that the coordinator knows
  };
  RemoteRank(const JoinRequest& request, Context context, std::shared_ptr<SessionSink> sink,
             std::function<void(absl::StatusOr<Joined>)> joined);

  std::uint32_t rank() const { return request_.rank; }
  std::uint64_t incarnation() const { return request_.incarnation; }

  // ---- For the link
  // Asks the coordinator for the rank's place.
  void SendOpen();
  // What the coordinator says; in order. True: that was the last word, and the link forgets this
  // rank.
  bool Take(const v1::SessionResponse& response);
  // The coordinator is gone, or does not take the rank. Nothing touches its memory.
  void End(const absl::Status& why);
  // Lose() comes with the same; what the coordinator makes of another rank's loss may come first.
  void WillBeLost(const absl::Status& why);
  // It has sent EndStep or, on a GPU, whose streams may have seen the verdict by then, marked every
  // bucket; and knows no verdict.
  bool InDoubt() const;
  // It has said something of a step, and knows no verdict.
  bool InStep() const;

  // The memory that a launch names; FAILED_PRECONDITION if there is none of this kind.
  struct LaunchMemory {
    std::byte* data = nullptr;
    std::shared_ptr<void> keep;
    std::shared_ptr<SemaphorePage> semaphores;  // null: of the staging memory
  };
  absl::StatusOr<LaunchMemory> MemoryOf(const v1::Launch& launch) const;
  // A bucket of an arena of this rank; NOT_FOUND if the arena is another's, FAILED_PRECONDITION if
  // it has no such bucket.
  absl::StatusOr<LentBucket> BucketOf(std::uint64_t arena, std::uint32_t bucket,
                                      std::uint64_t step) const;

  // ---- JobPort
  const std::string& job_id() const override { return request_.key.job_id; }
  std::string coordinator() const override { return context_.coordinator; }
  void RegisterLayout(std::uint32_t rank, LayoutRequest request, Registered answer) override;
  void Hold(std::uint32_t rank, std::uint32_t channel, std::shared_ptr<void> memory) override;
  void RefuseLayout(std::uint32_t rank, std::uint32_t channel, const absl::Status& why) override;
  absl::Status CheckReplaces(std::uint32_t rank, std::uint32_t channel) const override;
  absl::Status ArenaMapped(std::uint32_t rank, std::uint32_t channel, RankMemory memory) override;
  absl::Status MarkReady(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                         absl::Span<const std::uint32_t> buckets) override;
  absl::Status EndStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                       absl::string_view used_map) override;
  absl::Status FinishStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                          absl::string_view used_map) override;
  absl::Status AbandonStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                           absl::string_view reason) override;
  absl::Status Operate(std::uint32_t rank, std::uint64_t sequence, const OperationSpec& spec,
                       StagingMemory staging, std::uint64_t deadline_ns) override;
  absl::Status ChunkWritten(std::uint32_t rank, std::uint64_t sequence, std::uint64_t chunk,
                            std::uint64_t bytes) override;
  absl::Status ChunkRead(std::uint32_t rank, std::uint64_t sequence, std::uint64_t chunk) override;
  absl::Status Leave(std::uint32_t rank, bool exit) override;
  void AskMissing(std::uint32_t channel, std::uint64_t step,
                  std::function<void(std::string)> answer) override;
  void Lose(std::uint32_t rank, std::uint64_t incarnation, const absl::Status& why) override;
  RankState StateOf(std::uint32_t rank) const override;

 private:
  static constexpr std::size_t kMaxPending = 1024;

  struct Layout {
    std::uint64_t request_id = 0;
    std::uint32_t replaces = 0;
    LayoutPlan plan;
    std::shared_ptr<void> held;
    RankMemory memory;
    // The last one that it has said something of, that it has ended, and whose verdict it knows.
    std::uint64_t begun_step = 0;
    std::size_t marks = 0;  // of its buckets
    std::uint64_t ended_step = 0;
    std::uint64_t decided_step = 0;
  };
  struct Pending {
    LayoutSpec spec;
    std::uint32_t replaces = 0;
    Registered answer;
  };
  struct Question {
    std::uint32_t channel = 0;
    std::uint64_t step = 0;
    std::function<void(std::string)> answer;
  };

  void Say(v1::SessionRequest request) const;
  // What it says of its step: that so many more buckets are ready, or that it has ended.
  void NoteStep(std::uint32_t channel, std::uint64_t step, std::size_t marks, bool end);
  void SayEnd(std::uint32_t channel, std::uint64_t step, absl::string_view used_map,
              bool ready_rest);
  void OnOpened(const v1::SessionOpened& opened);
  void OnAssigned(const v1::LayoutAssigned& assigned);
  void OnLayoutReady(const v1::LayoutReady& ready);
  // True: it was the answer to a registration, which has it.
  bool OnLayoutFailed(std::uint64_t request_id, const absl::Status& why);
  void OnStepDone(const v1::StepDone& done);
  void OnLeaveDone(const v1::LeaveDone& done);
  void OnStepState(const v1::StepState& state);
  void Tell(SessionMessage message);
  void ReleaseLocked(Layout* layout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotAsked(absl::string_view what) const;

  const JoinRequest request_;
  const Context context_;

  mutable Mutex mutex_;
  std::shared_ptr<SessionSink> sink_ ABSL_GUARDED_BY(mutex_);  // null once it has ended
  std::function<void(absl::StatusOr<Joined>)> joined_ ABSL_GUARDED_BY(mutex_);
  RankState state_ ABSL_GUARDED_BY(mutex_) = RankState::kAbsent;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;  // RankGone was sent
  // Why, if it was lost here: what the coordinator says may be about another rank, lost with it.
  absl::Status own_end_ ABSL_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);  // by request_id
  std::map<std::uint32_t, Layout> layouts_ ABSL_GUARDED_BY(mutex_);   // by channel
  std::vector<Question> questions_ ABSL_GUARDED_BY(mutex_);
  StagingMemory staging_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync

#endif  // DAEMON_PEER_REMOTE_RANK_H_
