// The buckets that a worker is told to average, from Launch to LaunchDone.

#ifndef DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_
#define DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda.h"
#include "daemon/arena/cuda_arena.h"
#include "daemon/arena/cuda_semaphore_page.h"
#include "daemon/reduce/bucket_numbers.h"
#include "daemon/reduce/cuda_combine.h"
#include "daemon/worker/cuda_context.h"
#include "daemon/worker/cuda_staging.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {

// A session's memory of one layout.
struct CudaSessionMemory {
  std::unique_ptr<CudaArena> arena;
  std::unique_ptr<CudaSemaphorePage> semaphores;
};

struct CudaLaunch {
  std::uint64_t id = 0;
  std::uint32_t channel = 0;
  std::uint64_t step = 0;
  std::size_t bucket = 0;
  DataType dtype = DataType::kUnspecified;
  DataType staging_dtype = DataType::kUnspecified;
  std::size_t offset = 0;  // into each arena
  std::size_t count = 0;
  double scale = 1.0;
  std::vector<std::shared_ptr<CudaSessionMemory>> ranks;  // in rank order
  std::uint32_t void_contributions = 0;
  bool measure = false;
  bool last = false;
  std::size_t verdict_offset = 0;
};

struct CudaLaunchResult {
  std::uint64_t id = 0;
  std::uint64_t ready_ns = 0;
  std::uint64_t finish_ns = 0;
  BucketNumbers numbers;
  bool void_step = false;
};

// What sums staging over the job's GPUs, in place.
class CudaCollective {
 public:
  virtual ~CudaCollective() = default;
  // When it returns, the work is on the stream: what is enqueued after it follows it. `count`
  // includes the number of void contributions.
  virtual absl::Status AllReduce(const CudaStaging& staging, std::size_t count,
                                 CUstream stream) = 0;
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
  // `collective` may be null: one GPU. All outlive the queue.
  CudaLaunchQueue(const CudaContext* context, const CudaCombine* combine, CudaStagingPool* staging);
  ~CudaLaunchQueue();
  CudaLaunchQueue(const CudaLaunchQueue&) = delete;
  CudaLaunchQueue& operator=(const CudaLaunchQueue&) = delete;

  // From the next launch on that begins. Null: one GPU.
  void SetCollective(CudaCollective* collective) { collective_ = collective; }

  void Submit(CudaLaunch launch);

  // While paused no launch begins; what has begun finishes.
  void SetPaused(bool paused) { paused_ = paused; }

  // Takes a rank out of the launches that have not begun: they become void ones.
  void Remove(const CudaSessionMemory* rank);

  // Begins and finishes what can be, without waiting for anything; appends what has finished.
  absl::Status Advance(std::vector<CudaLaunchResult>* finished);

  // Nothing is under way: Advance has nothing to do before the next Submit.
  bool idle() const { return waiting_.empty() && under_way_.empty(); }
  // Nothing is on the GPU.
  bool at_rest() const { return under_way_.empty(); }
  bool Touches(const CudaSessionMemory* rank) const;

 private:
  struct UnderWay {
    CudaLaunch launch;
    CudaStagingPiece* piece;
    std::uint64_t ready_ns;
  };
  // The last step of a channel of which this worker has launched a bucket.
  struct ChannelStep {
    std::uint64_t step = 0;
    bool is_void = false;
  };

  static bool Ready(const CudaLaunch& launch);
  absl::Status Begin(const CudaLaunch& launch, const CudaStagingPiece& piece);
  absl::StatusOr<bool> Finished(const UnderWay& oldest) const;
  CudaLaunchResult ResultOf(const UnderWay& oldest) const;

  const CudaContext* const context_;
  const CudaDriver* const driver_;
  const CudaCombine* const combine_;
  CudaStagingPool* const staging_;
  CudaCollective* collective_ = nullptr;
  bool paused_ = false;
  std::deque<CudaLaunch> waiting_;
  std::deque<UnderWay> under_way_;  // in the order in which they finish
  std::map<std::uint32_t, ChannelStep> channels_;
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_CUDA_LAUNCH_QUEUE_H_
