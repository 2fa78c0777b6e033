// The sticky error: after an illegal access and the like nothing works in a process any more, and
// only its end clears that. Under MPS it reaches every client of the GPU.
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

  // The first error stays. `reason` goes to the journal.
  void Set(CUresult error, const std::string& reason);
  // CUDA_SUCCESS while all is well.
  CUresult Get();
  // From now on this process has a context on that GPU: what happens there under MPS reaches it.
  void Join(std::uint32_t gpu) { gpus_.fetch_or(1u << gpu); }

 private:
  const StateFolder& folder_;
  std::atomic<int> error_{CUDA_SUCCESS};
  std::atomic<std::uint32_t> gpus_{0};  // a bit for each GPU joined
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_PROCESS_FAULT_H_
