// The buckets that a worker is told to average, from Launch to LaunchDone.

#ifndef DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_
#define DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "cuda.h"
#include "daemon/engine/nccl_communicator.h"
#include "daemon/reduce/bucket_numbers.h"
#include "daemon/reduce/cuda_combine.h"
#include "daemon/worker/cuda_context.h"
#include "daemon/worker/cuda_session_memory.h"
#include "daemon/worker/cuda_staging.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {

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
  bool given_up = false;  // its step; it has no ranks any more
};

struct CudaLaunchResult {
  std::uint64_t id = 0;
  std::uint64_t ready_ns = 0;
  std::uint64_t finish_ns = 0;
  BucketNumbers numbers;
  bool void_step = false;
};

// In order: a launch begins when those before it have begun, every rank's ready word shows its step
// and a piece of staging is free. Up to then nothing is enqueued for it: the words are read here,
// on the host, and no stream of the worker ever waits for a trainer. From then on the GPU goes on
// by itself, up to the done words; Advance() sees it finish.
//
// The issuing thread's. One failure is the end: a worker whose GPU has failed starts again as
// another process.
class CudaLaunchQueue {
 public:
  // All outlive the queue. What has been on the GPU for `limit_ns` is taken for hanging.
  CudaLaunchQueue(const CudaContext* context, const CudaCombine* combine, CudaStagingPool* staging,
                  std::uint64_t limit_ns);
  ~CudaLaunchQueue();
  CudaLaunchQueue(const CudaLaunchQueue&) = delete;
  CudaLaunchQueue& operator=(const CudaLaunchQueue&) = delete;

  // Sums over all its ranks, from now on; it is settled and outlives its use. Null: this GPU alone.
  // Only at rest.
  void SetCommunicator(NcclCommunicator* communicator);

  void Submit(CudaLaunch launch);

  // While paused no launch begins; what has begun finishes.
  void SetPaused(bool paused) { paused_ = paused; }

  // Takes a rank out of the launches that have not begun: they become void ones.
  void Remove(const CudaSessionMemory* rank);

  // The same with every rank, in the launches of this step.
  void GiveUp(std::uint64_t layout, std::uint64_t step);

  // Begins and finishes what can be, without waiting for anything; appends what has finished.
  // DEADLINE_EXCEEDED GPU_TIMEOUT if something hangs, else the driver's and NCCL's statuses.
  absl::Status Advance(std::vector<CudaLaunchResult>* finished);

  // Nothing is under way: Advance has nothing to do before the next Submit.
  bool idle() const { return waiting_.empty() && at_rest(); }
  // Nothing is on the GPU.
  bool at_rest() const { return under_way_.empty() && !summing_.has_value(); }
  bool Touches(const CudaSessionMemory* rank) const;
  // Staging that the launch to begin next needs; 0: there is none. It does not begin in less.
  std::size_t next_staging_bytes() const;

 private:
  struct UnderWay {
    CudaLaunch launch;
    CudaStagingPiece* piece;
    std::uint64_t ready_ns;
    bool last = false;  // of its step
  };
  // The last step of a layout of which this worker has begun a bucket.
  struct LayoutStep {
    std::uint64_t step = 0;
    std::size_t begun = 0;  // buckets
    bool is_void = false;
  };

  static bool HasRank(const CudaLaunch& launch, const CudaSessionMemory* rank);

  absl::Status FinishOldest(std::vector<CudaLaunchResult>* finished);
  absl::Status BeginNext();
  // Counts a bucket of a step that may be complete.
  void NoteBegun(UnderWay* one);
  // The first half, up to the sum over the communicator.
  absl::Status Sum(const UnderWay& one);
  // The second, once the sum is on its stream.
  absl::Status WriteBack(const UnderWay& one);
  absl::Status SettleSum();
  absl::Status CheckDeadline() const;
  CudaLaunchResult ResultOf(const UnderWay& oldest) const;

  const CudaContext* const context_;
  const CudaDriver* const driver_;
  const CudaCombine* const combine_;
  CudaStagingPool* const staging_;
  const std::uint64_t limit_ns_;
  NcclCommunicator* communicator_ = nullptr;
  bool paused_ = false;
  std::deque<CudaLaunch> waiting_;
  std::optional<UnderWay> summing_;              // NCCL has not put it on the stream yet
  std::deque<UnderWay> under_way_;               // in the order in which they finish
  std::map<std::uint64_t, LayoutStep> layouts_;  // those whose step is not through
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_
