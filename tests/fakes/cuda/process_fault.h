// The sticky error of a process. After an illegal access, for example, every call fails until the
// process ends. Under MPS the error reaches every client of the GPU.
//
// Thread-safe.

#ifndef TESTS_FAKES_CUDA_PROCESS_FAULT_H_
#define TESTS_FAKES_CUDA_PROCESS_FAULT_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "tests/fakes/cuda/cuda_declarations.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

class ProcessFault {
 public:
  explicit ProcessFault(const StateFolder& folder) : folder_(folder) {}

  // Sets the sticky error, if there is none yet. Writes `reason` to the journal.
  void Set(CUresult error, const std::string& reason);
  // The sticky error; CUDA_SUCCESS if there is none.
  CUresult Get();
  // From now on this process has a context on the GPU. Under MPS, errors of other clients of that
  // GPU reach it.
  void Join(std::uint32_t gpu) { gpus_.fetch_or(1u << gpu); }

 private:
  const StateFolder& folder_;
  std::atomic<int> error_{CUDA_SUCCESS};
  std::atomic<std::uint32_t> gpus_{0};  // a bit for each GPU joined
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_PROCESS_FAULT_H_
