#include "daemon/worker/cuda_ready_waits.h"

#include <algorithm>

namespace gradsync::daemon {

void CudaReadyWaits::Remove(const CudaSessionMemory* rank) {
  for (CudaReadyWait& wait : waits_) {
    wait.ranks.erase(std::remove_if(wait.ranks.begin(), wait.ranks.end(),
                                    [&](const auto& other) { return other.get() == rank; }),
                     wait.ranks.end());
  }
}

void CudaReadyWaits::GiveUp(std::uint64_t layout, std::uint64_t step) {
  for (CudaReadyWait& wait : waits_) {
    if (wait.layout == layout && wait.step == step) wait.ranks.clear();
  }
}

std::vector<std::uint64_t> CudaReadyWaits::TakeReady() {
  std::vector<std::uint64_t> calls;
  const auto ready = [&calls](const CudaReadyWait& wait) {
    if (!AllReady(wait.ranks, wait.bucket, wait.step)) return false;
    calls.push_back(wait.call);
    return true;
  };
  waits_.erase(std::remove_if(waits_.begin(), waits_.end(), ready), waits_.end());
  return calls;
}

}  // namespace gradsync::daemon
