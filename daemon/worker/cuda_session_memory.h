// A worker's memory for one layout of one session.

#ifndef DAEMON_WORKER_CUDA_SESSION_MEMORY_H_
#define DAEMON_WORKER_CUDA_SESSION_MEMORY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/arena/cuda_arena.h"
#include "daemon/arena/cuda_semaphore_page.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {

struct CudaSessionMemory {
  std::unique_ptr<CudaArena> arena;
  std::unique_ptr<CudaSemaphorePage> semaphores;
  UniqueFd trainer;  // its process's pidfd; invalid if that is not known
};

using CudaRanks = std::vector<std::shared_ptr<CudaSessionMemory>>;  // in rank order

inline bool AllReady(const CudaRanks& ranks, std::size_t bucket, std::uint64_t step) {
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](const auto& rank) { return rank->semaphores->Ready(bucket, step); });
}

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_SESSION_MEMORY_H_
