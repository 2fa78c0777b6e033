// The AwaitReady calls that a worker has not replied to.

#ifndef DAEMON_WORKER_CUDA_READY_WAITS_H_
#define DAEMON_WORKER_CUDA_READY_WAITS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "daemon/worker/cuda_session_memory.h"

namespace gradsync::daemon {

struct CudaReadyWait {
  std::uint64_t call = 0;
  std::uint64_t layout = 0;
  std::uint64_t step = 0;
  std::size_t bucket = 0;
  CudaRanks ranks;
};

// TakeReady reads the ready words on the host. Nothing is enqueued on the GPU, and a wait may last
// as long as the trainer's step. For the issuing thread alone.
class CudaReadyWaits {
 public:
  void Add(CudaReadyWait wait) { waits_.push_back(std::move(wait)); }
  // Stops waiting for the rank, in all waits.
  void Remove(const CudaSessionMemory* rank);
  // Stops waiting for any rank in this step.
  void GiveUp(std::uint64_t layout, std::uint64_t step);

  // Removes the waits that have ended, and returns the ids of their calls.
  std::vector<std::uint64_t> TakeReady();
  bool empty() const { return waits_.empty(); }

 private:
  std::vector<CudaReadyWait> waits_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_READY_WAITS_H_
