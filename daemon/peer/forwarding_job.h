// One local rank of a job that another node coordinates. To the rank's session it is the job; it
// forwards the rank's messages to the coordinator, and the answers to the session.

#ifndef DAEMON_PEER_FORWARDING_JOB_H_
#define DAEMON_PEER_FORWARDING_JOB_H_

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
#include "daemon/peer/worker_proxy_server.h"
#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync::daemon {

// Thread-safe. Lock order: only the sink's and the link's queues come after ForwardingJob::mutex_.
// It keeps the rank's memory for as long as the coordinator may launch on it, which is until the
// coordinator says that the session has ended.
class ForwardingJob final : public JobPort, public std::enable_shared_from_this<ForwardingJob> {
 public:
  struct Context {
    std::function<void(v1::AttachRequest)> send;
    Executor* executor = nullptr;  // frees memory
    const Clock* clock = nullptr;
    std::size_t max_buckets = 4096;
    std::string coordinator;                     // its address
    std::shared_ptr<WorkerProxyServer> workers;  // the workers that the coordinator may call
  };
  ForwardingJob(const JoinRequest& request, Context context, std::shared_ptr<SessionSink> sink,
                std::function<void(absl::StatusOr<Joined>)> joined);

  std::uint32_t rank() const { return request_.rank; }
  std::uint64_t incarnation() const { return request_.incarnation; }

  // ---- For the link
  // Asks the coordinator to join the rank to the job.
  void SendOpen();
  // Takes the coordinator's next message. True: it was the last one, and the link forgets this
  // rank.
  bool Take(const v1::SessionResponse& response);
  // The coordinator is lost, or has refused or ended the rank. Nothing touches its memory any more.
  void End(const absl::Status& why);
  // Lose() follows with the same status. If the coordinator ends the rank before that because of
  // another rank's loss, this status is the one that counts.
  void WillBeLost(const absl::Status& why);
  // The rank has sent EndStep, and knows no verdict. On a GPU: it has marked every bucket, because
  // its streams may then have seen the verdict.
  bool InDoubt() const;
  // The rank has begun a step, and knows no verdict.
  bool InStep() const;

  // The memory that a launch names. FAILED_PRECONDITION if the rank has no such memory.
  struct LaunchMemory {
    std::byte* data = nullptr;
    std::shared_ptr<void> keep;
    std::shared_ptr<SemaphorePage> semaphores;  // null for staging memory
  };
  absl::StatusOr<LaunchMemory> MemoryOf(const v1::Launch& launch) const;
  // A bucket of an arena of this rank. NOT_FOUND if the arena is not this rank's,
  // FAILED_PRECONDITION if it has no such bucket.
  absl::StatusOr<ProxiedBucket> BucketOf(std::uint64_t arena, std::uint32_t bucket,
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
    std::uint64_t begun_step = 0;    // the last step that the rank has begun
    std::size_t marks = 0;           // buckets of that step that it has marked
    std::uint64_t ended_step = 0;    // the last one for which it has sent EndStep
    std::uint64_t decided_step = 0;  // the last one with a verdict
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

  void Forward(v1::SessionRequest request) const;
  // Notes that the rank has marked so many more buckets of its step, or ended it.
  void NoteStep(std::uint32_t channel, std::uint64_t step, std::size_t marks, bool end);
  void ForwardEnd(std::uint32_t channel, std::uint64_t step, absl::string_view used_map,
                  bool ready_rest);
  void OnOpened(const v1::SessionOpened& opened);
  void OnAssigned(const v1::LayoutAssigned& assigned);
  void OnLayoutReady(const v1::LayoutReady& ready);
  // True: it was the answer to a registration, and has been delivered.
  bool OnLayoutFailed(std::uint64_t request_id, const absl::Status& why);
  void OnStepDone(const v1::StepDone& done);
  void OnLeaveDone(const v1::LeaveDone& done);
  void OnStepState(const v1::StepState& state);
  void ReleaseLocked(Layout* layout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WrongLaunch(absl::string_view what) const;

  const JoinRequest request_;
  const Context context_;

  mutable Mutex mutex_;
  std::shared_ptr<SessionSink> sink_ ABSL_GUARDED_BY(mutex_);  // null once the session has ended
  std::function<void(absl::StatusOr<Joined>)> joined_ ABSL_GUARDED_BY(mutex_);
  RankState state_ ABSL_GUARDED_BY(mutex_) = RankState::kAbsent;
  bool end_sent_ ABSL_GUARDED_BY(mutex_) = false;  // RankEnded was sent
  // Why the rank was lost here. The coordinator's reason may be another rank, lost with this one.
  absl::Status own_end_ ABSL_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);  // by request_id
  std::map<std::uint32_t, Layout> layouts_ ABSL_GUARDED_BY(mutex_);   // by channel
  std::vector<Question> questions_ ABSL_GUARDED_BY(mutex_);
  StagingMemory staging_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_FORWARDING_JOB_H_
