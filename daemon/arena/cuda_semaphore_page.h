// The worker's side of the timeline semaphores of one session's layout on a GPU: host memory that
// the GPU writes. proto/gradsync/shared_memory.h describes this memory.

#ifndef DAEMON_ARENA_CUDA_SEMAPHORE_PAGE_H_
#define DAEMON_ARENA_CUDA_SEMAPHORE_PAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda.h"
#include "daemon/base/unique_fd.h"
#include "daemon/cuda/cuda_driver.h"

namespace gradsync::daemon {

// A mapping of the daemon's SemaphorePage, registered with the driver. Not thread-safe: only the
// issuing thread uses it.
class CudaSemaphorePage {
 public:
  // `memory` is the page's descriptor. INVALID_ARGUMENT if it is too small for `buckets`.
  static absl::StatusOr<std::unique_ptr<CudaSemaphorePage>> Register(const CudaDriver* driver,
                                                                     UniqueFd memory,
                                                                     std::size_t buckets);
  ~CudaSemaphorePage();
  CudaSemaphorePage(const CudaSemaphorePage&) = delete;
  CudaSemaphorePage& operator=(const CudaSemaphorePage&) = delete;

  std::size_t buckets() const { return buckets_; }

  // True if the trainer's stream has written its gradients of `bucket` in `step`. The trainer can
  // write any value into this word, so use the answer only to decide whether to read this trainer's
  // own gradients.
  bool Ready(std::size_t bucket, std::uint64_t step) const;

  // The device address where a stream writes the step's number once the bucket is done.
  CUdeviceptr DoneAddress(std::size_t bucket) const;

 private:
  CudaSemaphorePage(const CudaDriver* driver, std::size_t buckets, void* address,
                    std::size_t bytes);

  const CudaDriver* const driver_;
  const std::size_t buckets_;
  void* const address_;
  const std::size_t bytes_;
  bool registered_ = false;
  CUdeviceptr device_address_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_CUDA_SEMAPHORE_PAGE_H_
