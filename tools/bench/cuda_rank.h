// What every rank on a GPU has: a context, a stream, and page-locked memory that is filled and
// checked.

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
#include "tools/bench/peer.h"

namespace gradsync::bench {

// Used by one thread, in which its context is current from Open on. Statuses are the driver's.
class CudaRank {
 public:
  static absl::StatusOr<std::unique_ptr<CudaRank>> Open(const PeerOptions& options);
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  const CudaDriver& driver() const { return *driver_; }
  const CudaDevice& device() const { return device_; }
  CUstream stream() const { return stream_; }

  // Host memory of `bytes` bytes; the last one is freed.
  absl::Status AllocateHost(std::size_t bytes);
  std::byte* host() const { return host_; }
  // On the GPU, all of it freed by FreeDevice or the destructor.
  absl::StatusOr<CUdeviceptr> AllocateDevice(std::size_t bytes);
  void FreeDevice();

  // host() to the GPU's memory, and back; there when they return.
  absl::Status Upload(CUdeviceptr to);
  absl::Status Download(CUdeviceptr from);

  absl::Status Synchronize() { return driver_->cuStreamSynchronize(stream_); }
  // What the stream takes from Start to Stop, by the GPU's clock: at least 1. Stop waits for it.
  absl::Status Start() { return driver_->cuEventRecord(begin_, stream_); }
  absl::StatusOr<std::int64_t> StopNs();

 private:
  explicit CudaRank(std::unique_ptr<const CudaDriver> driver) : driver_(std::move(driver)) {}

  const std::unique_ptr<const CudaDriver> driver_;
  CudaDevice device_;
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
