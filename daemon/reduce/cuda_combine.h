// Launches the kernels of a bucket's reduction (cuda_kernels.h) on one GPU.

#ifndef DAEMON_REDUCE_CUDA_COMBINE_H_
#define DAEMON_REDUCE_CUDA_COMBINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda.h"
#include "daemon/cuda/cuda_driver.h"
#include "daemon/reduce/bucket_numbers.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {

// A bucket in worker-private device memory, between combine and write-back.
struct CudaStaging {
  CUdeviceptr address = 0;                  // aligned to 16 bytes
  DataType dtype = DataType::kUnspecified;  // as which the bucket's type can be staged
};

// All launches are enqueued on the stream and return; whoever waits for the stream sees their
// result. Statuses are the driver's. The context in which it was loaded is current in every call,
// the destructor's too. Not thread-safe: the worker's issuing thread has it.
class CudaCombine {
 public:
  // Loads every kernel: a kernel that is loaded at its first launch can wait for collectives that
  // spin until it has run.
  static absl::StatusOr<std::unique_ptr<CudaCombine>> Load(const CudaDriver* driver,
                                                           CUdevice device);
  ~CudaCombine();
  CudaCombine(const CudaCombine&) = delete;
  CudaCombine& operator=(const CudaCombine&) = delete;

  // staging = sources[0] + sources[1] + ..., in this order; behind it `void_contributions`.
  absl::Status Combine(CUstream stream, DataType dtype, absl::Span<const CUdeviceptr> sources,
                       std::size_t count, std::uint32_t void_contributions,
                       const CudaStaging& staging) const;

  // Every destination = staging * scale. `numbers`, unless 0, is the device's address of
  // kMaxCudaBlocks BucketNumbers, of which the first Blocks() are written: their sum, in this
  // order, is the bucket's. `void_flag` is a float on the device, which becomes 1 if the
  // number of void contributions is not 0.
  absl::Status WriteBack(CUstream stream, DataType dtype, const CudaStaging& staging,
                         std::size_t count, double scale,
                         absl::Span<const CUdeviceptr> destinations, CUdeviceptr numbers,
                         CUdeviceptr void_flag) const;

  // Blocks of a launch: one for each so many elements, up to what fills the GPU.
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
};

}  // namespace gradsync

#endif  // DAEMON_REDUCE_CUDA_COMBINE_H_
