// The buckets that a worker averages, from Launch to LaunchDone.

#ifndef DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_
#define DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "cuda.h"
#include "daemon/engine/nccl_communicator.h"
#include "daemon/reduce/cuda_combine.h"
#include "daemon/reduce/gradient_stats.h"
#include "daemon/worker/cuda_context.h"
#include "daemon/worker/cuda_session_memory.h"
#include "daemon/worker/cuda_staging.h"
#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {

struct CudaLaunch {
  std::uint64_t id = 0;
  std::uint64_t layout = 0;
  std::uint64_t step = 0;
  std::size_t bucket = 0;
  DataType dtype = DataType::kUnspecified;
  DataType staging_dtype = DataType::kUnspecified;
  std::size_t offset = 0;  // into each arena
  std::size_t count = 0;
  double scale = 1.0;
  CudaRanks ranks;
  std::uint32_t void_contributions = 0;
  bool measure = false;
  std::size_t step_buckets = 0;
  std::size_t verdict_offset = 0;
  bool given_up = false;  // its step was given up, so it has no ranks
};

struct CudaLaunchResult {
  std::uint64_t id = 0;
  std::uint64_t ready_ns = 0;
  std::uint64_t finish_ns = 0;
  GradientStats stats;
  bool void_step = false;
};

// Runs launches in order. A launch begins when the launches before it have begun, every rank's
// ready word shows its step, and a piece of staging is free. Until then nothing is enqueued for it:
// this class reads the ready words on the host, so no stream of the worker ever waits for a
// trainer. Without a communicator, beginning a launch enqueues all of it. With one, Advance() still
// has to enqueue the all-reduce and the write-back. The GPU writes the done words, and Advance()
// sees that the launch has finished.
//
// For the issuing thread alone. After one failure the queue is unusable: the worker exits, and
// another process takes its place.
class CudaLaunchQueue {
 public:
  // The arguments must outlive the queue. A launch that is on the GPU for `limit_ns` counts as
  // hung.
  CudaLaunchQueue(const CudaContext* context, const CudaCombine* combine, CudaStagingPool* staging,
                  std::uint64_t limit_ns);
  ~CudaLaunchQueue();
  CudaLaunchQueue(const CudaLaunchQueue&) = delete;
  CudaLaunchQueue& operator=(const CudaLaunchQueue&) = delete;

  // From now on, launches sum over all ranks of `communicator`, which is settled and must outlive
  // its use. Null: they sum over this GPU alone. Requires at_rest().
  void SetCommunicator(NcclCommunicator* communicator);

  void Submit(CudaLaunch launch);

  // While paused, no launch begins. Launches that have begun finish.
  void SetPaused(bool paused) { paused_ = paused; }

  // Takes a rank out of the launches that have not begun. This makes those launches void.
  void Remove(const CudaSessionMemory* rank);

  // Takes all ranks out of the launches of this step that have not begun.
  void GiveUp(std::uint64_t layout, std::uint64_t step);

  // Begins and finishes launches as far as possible, without waiting. Appends the finished ones.
  // DEADLINE_EXCEEDED GPU_TIMEOUT if a launch hangs; otherwise the driver's and NCCL's statuses.
  absl::Status Advance(std::vector<CudaLaunchResult>* finished);

  // How often any launch has begun, progressed or finished so far.
  std::uint64_t advances() const { return advances_; }

  // True if no launch waits or is under way. Then Advance has nothing to do before the next Submit.
  bool idle() const { return waiting_.empty() && at_rest(); }
  // True if no launch is on the GPU.
  bool at_rest() const { return under_way_.empty() && combined_.empty(); }
  bool Touches(const CudaSessionMemory* rank) const;
  // Bytes of staging that the next launch needs to begin; 0 if no launch waits.
  std::size_t next_staging_bytes() const;

 private:
  struct UnderWay {
    CudaLaunch launch;
    CudaStagingPiece* piece;
    std::uint64_t ready_ns;
    bool last = false;  // the last bucket of its step
  };
  // The last step of a layout in which this worker has begun a bucket.
  struct LayoutStep {
    std::uint64_t step = 0;
    std::size_t begun = 0;  // buckets
    bool is_void = false;
  };

  static bool HasRank(const CudaLaunch& launch, const CudaSessionMemory* rank);

  absl::Status FinishOldest(std::vector<CudaLaunchResult>* finished);
  absl::Status BeginNext();
  // Counts a begun bucket of its step.
  void NoteBegun(UnderWay* one);
  // True if the launch involves this GPU alone, and one kernel can carry it out.
  bool NeedsNoStaging(const CudaLaunch& launch) const;
  // Enqueues such a launch.
  absl::Status Average(const UnderWay& one);
  // Any other launch is enqueued in three parts. First, the sum of this GPU's ranks.
  absl::Status Combine(const UnderWay& one);
  // Second, the sum over the communicator, which must be settled before this part and before the
  // next one.
  absl::Status AllReduce(const UnderWay& one);
  // Third, the average.
  absl::Status WriteBack(const UnderWay& one);
  // What the launch's last kernel writes. `buffers`: those of its ranks.
  static CudaOutput OutputOf(const UnderWay& one, const std::vector<CUdeviceptr>& buffers);
  // Enqueues the done words, behind that kernel.
  absl::Status Announce(const UnderWay& one);
  // Enqueues the all-reduces and write-backs of combined launches, as far as NCCL is ready.
  absl::Status AdvanceSums();
  absl::Status CheckDeadline() const;
  CudaLaunchResult ResultOf(const UnderWay& oldest) const;

  const CudaContext* const context_;
  const CudaDriver* const driver_;
  const CudaCombine* const combine_;
  CudaStagingPool* const staging_;
  const std::uint64_t limit_ns_;
  NcclCommunicator* communicator_ = nullptr;
  bool paused_ = false;
  std::uint64_t advances_ = 0;
  std::deque<CudaLaunch> waiting_;
  // With a communicator: launches whose first part is enqueued, and whose last part is not. On the
  // host they wait for NCCL, which takes one call at a time. They do not wait until another launch
  // has finished.
  std::deque<UnderWay> combined_;
  bool summing_ = false;                         // the first of them is with NCCL
  std::deque<UnderWay> under_way_;               // in the order in which they finish
  std::map<std::uint64_t, LayoutStep> layouts_;  // until the last bucket of the step has begun
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_
