// The buckets that a worker was asked about, until their gradients are there.

#ifndef DAEMON_WORKER_CUDA_READY_WAITS_H_
#define DAEMON_WORKER_CUDA_READY_WAITS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "daemon/worker/cuda_session_memory.h"

namespace gradsync {

struct CudaReadyWait {
  std::uint64_t call = 0;
  std::uint64_t layout = 0;
  std::uint64_t step = 0;
  std::size_t bucket = 0;
  CudaRanks ranks;
};

// The ready words are read on the host, when asked to: nothing is enqueued for a wait, and a
// trainer may take as long as its step may. The issuing thread's.
class CudaReadyWaits {
 public:
  void Add(CudaReadyWait wait) { waits_.push_back(std::move(wait)); }
  // The rank is waited for no more.
  void Remove(const CudaSessionMemory* rank);
  // Nor is any, in this step.
  void GiveUp(std::uint64_t layout, std::uint64_t step);

  // The calls of those that are over, which are forgotten.
  std::vector<std::uint64_t> TakeOver();
  bool empty() const { return waits_.empty(); }

 private:
  std::vector<CudaReadyWait> waits_;
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_CUDA_READY_WAITS_H_
