// Counts how often this process's gradsync client has waited for its GPU.

#ifndef TOOLS_BENCH_CUDA_SYNCHRONIZATIONS_H_
#define TOOLS_BENCH_CUDA_SYNCHRONIZATIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gradsync::bench {

// The client opens the CUDA driver at run time. This class makes it open libcounting_cuda_driver.so
// instead, which returns the real driver's functions and counts calls of those that wait.
class CudaSynchronizations {
 public:
  // Call it before the client's first use of CUDA. `cuda_library` is the real driver's. NOT_FOUND
  // if the counting library does not lie beside this program.
  static absl::StatusOr<CudaSynchronizations> Count(const std::string& cuda_library);

  CudaSynchronizations() = default;
  std::uint64_t so_far() const { return so_far_(); }

 private:
  std::uint64_t (*so_far_)() = nullptr;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CUDA_SYNCHRONIZATIONS_H_
