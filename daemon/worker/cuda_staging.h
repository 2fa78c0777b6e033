// Where buckets are summed: memory of the GPU that no trainer ever sees.

#ifndef DAEMON_WORKER_CUDA_STAGING_H_
#define DAEMON_WORKER_CUDA_STAGING_H_

#include <array>
#include <cstddef>
#include <functional>

#include "absl/status/status.h"
#include "cuda.h"
#include "daemon/reduce/cuda_kernels.h"
#include "daemon/reduce/gradient_stats.h"
#include "daemon/worker/cuda_context.h"

namespace gradsync::daemon {

// Results that the kernels write into host memory.
struct CudaBucketReport {
  std::array<GradientStats, kMaxCudaBlocks> stats;  // by block
  float void_flag;
};

// Memory for one bucket from its combine kernel to its done words, and the events between them.
struct CudaStagingPiece {
  bool free = true;
  CUdeviceptr address = 0;
  CudaBucketReport* report = nullptr;
  CUdeviceptr report_address = 0;  // the report's address on the GPU
  CUevent combined = nullptr;
  CUevent collected = nullptr;
  CUevent written = nullptr;
};

// A few pieces of equal size, which are used in turn. The offset of a piece depends only on the
// buckets since Restart, so it is the same on every GPU. Reason: NCCL sums registered memory in
// NVLink's switches only if the offsets are equal.
//
// For the issuing thread alone.
class CudaStagingPool {
 public:
  // One piece for a bucket that is being combined, one for a bucket in the all-reduce, and one for
  // a bucket that is being written back. The fourth covers the time until the host sees that a
  // bucket has finished.
  static constexpr std::size_t kPieces = 4;

  // How the memory is allocated and freed: by the driver, or by NCCL, so that NCCL can register it.
  struct Allocator {
    std::function<absl::Status(CUdeviceptr* address, std::size_t bytes)> allocate;
    std::function<void(CUdeviceptr address)> free;
  };

  // Allocates with the driver, until SetAllocator.
  explicit CudaStagingPool(const CudaContext* context);
  ~CudaStagingPool();
  CudaStagingPool(const CudaStagingPool&) = delete;
  CudaStagingPool& operator=(const CudaStagingPool&) = delete;

  // Makes the events and reports. Call it once, first.
  absl::Status Open();

  // True if Reserve(bytes) has nothing to do.
  bool Holds(std::size_t bytes) const { return bytes <= piece_bytes_; }
  // Makes every piece hold at least `bytes`. Requires that all pieces are free. RESOURCE_EXHAUSTED
  // if the GPU has no room: then nothing has changed.
  absl::Status Reserve(std::size_t bytes);

  // Moves the memory to another allocator, and allocates with it from now on. Requires that all
  // pieces are free. Fails as Reserve does.
  absl::Status SetAllocator(const Allocator& allocator);

  // True if the next piece can be taken for a bucket of `bytes`. While pieces are in use, this is
  // false for a bucket that is larger than all before it.
  bool CanTake(std::size_t bytes) const;
  // Requires CanTake(bytes). The caller sets pieces `free` again in the order in which they were
  // taken.
  CudaStagingPiece* Take(std::size_t bytes);
  // Places the next bucket as if it were the first. Requires that all pieces are free.
  void Restart();

  CUdeviceptr address() const { return memory_; }  // 0: nothing has been reserved yet
  std::size_t bytes() const { return piece_bytes_ * kPieces; }

 private:
  absl::Status Allocate(std::size_t piece_bytes, const Allocator& allocator);
  // The error for an allocation of `wanted` bytes that has failed with `status`.
  absl::Status AllocationError(std::size_t wanted, const absl::Status& status) const;
  void Free();
  bool AllFree() const;

  const CudaDriver* const driver_;
  Allocator allocator_;
  CUdeviceptr memory_ = 0;
  std::size_t piece_bytes_ = 0;  // the most that a piece may have
  std::size_t stride_ = 0;       // between pieces: bytes of the largest bucket since Restart
  std::size_t next_ = 0;
  std::array<CudaStagingPiece, kPieces> pieces_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_STAGING_H_
