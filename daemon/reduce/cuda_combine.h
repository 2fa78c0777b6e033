// Launches the kernels of a bucket's reduction (cuda_kernels.h) on one GPU.

#ifndef DAEMON_REDUCE_CUDA_COMBINE_H_
#define DAEMON_REDUCE_CUDA_COMBINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda.h"
#include "daemon/cuda/cuda_driver.h"
#include "daemon/reduce/gradient_stats.h"
#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {

// A bucket's sum in device memory of the worker, between combine and write-back.
struct CudaStaging {
  CUdeviceptr address = 0;                  // aligned to 16 bytes
  DataType dtype = DataType::kUnspecified;  // a type that CanBeStagedAs allows for the bucket
};

// Where an average goes, and what the GPU reports about it.
struct CudaOutput {
  absl::Span<const CUdeviceptr> destinations;
  // Bytes from each destination to a float that becomes 1 if the step is void, else 0.
  std::optional<std::int64_t> verdict_distance;
  // Address of kMaxCudaBlocks GradientStats; 0: none. The kernel writes the first Blocks() of them;
  // their sum, in this order, is the bucket's.
  CUdeviceptr stats = 0;
  // Address of a float. It becomes 1 if the number of void contributions is not 0, else 0.
  CUdeviceptr void_flag = 0;
};

// Every call enqueues its launches on the stream and returns: the results are valid once the caller
// has waited for the stream. Statuses are the driver's. Every call, the destructor too, needs the
// context that was current in Load(). Not thread-safe: only the worker's issuing thread uses it.
// Owns the loaded module.
class CudaCombine {
 public:
  // Loads every kernel now. Otherwise the first launch of a kernel would load it, which can wait
  // for a running collective, and that collective may spin until the kernel has run.
  static absl::StatusOr<std::unique_ptr<CudaCombine>> Load(const CudaDriver* driver,
                                                           CUdevice device);
  ~CudaCombine();
  CudaCombine(const CudaCombine&) = delete;
  CudaCombine& operator=(const CudaCombine&) = delete;

  // staging = sources[0] + sources[1] + ..., in this order. Writes `void_contributions` behind the
  // sum.
  absl::Status Combine(CUstream stream, DataType dtype, absl::Span<const CUdeviceptr> sources,
                       std::size_t count, std::uint32_t void_contributions,
                       const CudaStaging& staging) const;

  // Every destination = staging * scale.
  absl::Status WriteBack(CUstream stream, DataType dtype, const CudaStaging& staging,
                         std::size_t count, double scale, const CudaOutput& output) const;

  // True if Average gives the same bits as Combine and WriteBack with this type of staging.
  static bool CanAverage(DataType dtype, DataType staging, std::size_t destinations);
  // Every destination = the sum of all destinations, in their order, * scale. Needs no staging.
  absl::Status Average(CUstream stream, DataType dtype, std::size_t count, double scale,
                       std::uint32_t void_contributions, const CudaOutput& output) const;

  // The number of blocks of a launch. It grows with `count`, up to the number that fills the GPU.
  std::uint32_t Blocks(DataType dtype, DataType staging, std::size_t count) const;

 private:
  struct Kernels {
    CUfunction combine = nullptr;
    CUfunction write_back = nullptr;
  };

  CudaCombine(const CudaDriver* driver, std::uint32_t max_blocks);

  absl::Status LoadKernels();
  const Kernels& KernelsOf(DataType dtype, DataType staging) const;
  absl::Status Launch(CUfunction kernel, std::uint32_t blocks, CUstream stream,
                      void* arguments) const;

  const CudaDriver* const driver_;
  const std::uint32_t max_blocks_;
  CUmodule module_ = nullptr;
  std::array<std::array<Kernels, 5>, 5> kernels_;  // by DataType of the bucket and of its staging
  std::array<CUfunction, 5> average_{};            // by DataType of the bucket
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_CUDA_COMBINE_H_
