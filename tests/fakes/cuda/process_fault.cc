#include "tests/fakes/cuda/process_fault.h"

namespace gradsync::fakes {

void ProcessFault::Set(CUresult error, const std::string& reason) {
  int none = CUDA_SUCCESS;
  if (!error_.compare_exchange_strong(none, error)) return;
  folder_.Note(kViolation, "sticky error " + std::to_string(error) + ": " + reason);
  if (!folder_.machine().mps) return;
  for (std::uint32_t gpu = 0; gpu < kMaxGpus; ++gpu) {
    if ((gpus_.load() >> gpu & 1) != 0) folder_.board().mps_fault[gpu].store(error);
  }
}

CUresult ProcessFault::Get() {
  if (folder_.machine().mps && error_.load() == CUDA_SUCCESS) {
    for (std::uint32_t gpu = 0; gpu < kMaxGpus; ++gpu) {
      const int shared = folder_.board().mps_fault[gpu].load();
      if ((gpus_.load() >> gpu & 1) == 0 || shared == CUDA_SUCCESS) continue;
      Set(static_cast<CUresult>(shared), "of another MPS client of GPU " + std::to_string(gpu));
    }
  }
  return static_cast<CUresult>(error_.load());
}

}  // namespace gradsync::fakes
