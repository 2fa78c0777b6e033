// What every rank on a GPU has: a context, a stream, and page-locked host memory for filling and
// checking buffers.

#ifndef TOOLS_BENCH_CUDA_RANK_H_
#define TOOLS_BENCH_CUDA_RANK_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda.h"
#include "daemon/cuda/cuda_device.h"
#include "daemon/cuda/cuda_driver.h"
#include "tools/bench/contestant.h"

namespace gradsync::bench {

// Used by one thread, in which its context is current from Open on. Statuses are the driver's.
class CudaRank {
 public:
  static absl::StatusOr<std::unique_ptr<CudaRank>> Open(const ContestantOptions& options);
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  const daemon::CudaDriver& driver() const { return *driver_; }
  const daemon::CudaDevice& device() const { return device_; }
  CUstream stream() const { return stream_; }

  // Allocates `bytes` of host memory. Frees what the previous call has allocated.
  absl::Status AllocateHost(std::size_t bytes);
  std::byte* host() const { return host_; }
  // Allocates memory on the GPU. FreeDevice or the destructor frees all of it.
  absl::StatusOr<CUdeviceptr> AllocateDevice(std::size_t bytes);
  void FreeDevice();

  // Copies host() to the GPU's memory, and back. The copy has ended when they return.
  absl::Status Upload(CUdeviceptr to);
  absl::Status Download(CUdeviceptr from);

  absl::Status Synchronize() { return driver_->cuStreamSynchronize(stream_); }
  // Measures by the GPU's clock how long the stream takes from Start to StopNs. StopNs waits for
  // the stream, and returns at least 1.
  absl::Status Start() { return driver_->cuEventRecord(begin_, stream_); }
  absl::StatusOr<std::int64_t> StopNs();

 private:
  explicit CudaRank(std::unique_ptr<const daemon::CudaDriver> driver)
      : driver_(std::move(driver)) {}

  const std::unique_ptr<const daemon::CudaDriver> driver_;
  daemon::CudaDevice device_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent begin_ = nullptr;
  CUevent end_ = nullptr;
  std::byte* host_ = nullptr;
  std::size_t host_bytes_ = 0;
  std::vector<CUdeviceptr> allocations_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CUDA_RANK_H_
