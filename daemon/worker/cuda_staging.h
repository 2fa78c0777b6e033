// Where buckets are summed: memory of the GPU that no trainer ever sees.

#ifndef DAEMON_WORKER_CUDA_STAGING_H_
#define DAEMON_WORKER_CUDA_STAGING_H_

#include <array>
#include <cstddef>
#include <functional>

#include "absl/status/status.h"
#include "cuda.h"
#include "daemon/reduce/bucket_numbers.h"
#include "daemon/reduce/cuda_kernels.h"
#include "daemon/worker/cuda_context.h"

namespace gradsync {

// What the kernels tell the host, in its memory.
struct CudaBucketReport {
  std::array<BucketNumbers, kMaxCudaBlocks> numbers;  // by block
  float void_flag;
};

// Room for one bucket between its combine and its done words, and the events that order them.
struct CudaStagingPiece {
  bool free = true;
  CUdeviceptr address = 0;
  CudaBucketReport* report = nullptr;
  CUdeviceptr report_address = 0;  // the same, as the GPU sees it
  CUevent combined = nullptr;
  CUevent collected = nullptr;
  CUevent written = nullptr;
};

// A few pieces of the same size, which are used in turn. Where a piece lies in the memory follows
// from the buckets since Restart, and from nothing else that this worker has done: NCCL sums
// registered memory within NVLink's switches only if it is at the same offset on every GPU.
//
// The issuing thread's.
class CudaStagingPool {
 public:
  // One is combined while another is between the nodes and a third is written back; the fourth
  // covers the time until the host sees the third finish.
  static constexpr std::size_t kPieces = 4;

  // How the memory is allocated and freed: by the driver, or by NCCL, which registers it.
  struct Allocator {
    std::function<absl::Status(CUdeviceptr* address, std::size_t bytes)> allocate;
    std::function<void(CUdeviceptr address)> free;
  };

  // Of the driver's memory.
  explicit CudaStagingPool(const CudaContext* context);
  ~CudaStagingPool();
  CudaStagingPool(const CudaStagingPool&) = delete;
  CudaStagingPool& operator=(const CudaStagingPool&) = delete;

  // Makes events and reports. Once, before all else.
  absl::Status Open();

  // Whether Reserve(bytes) has nothing to do.
  bool Holds(std::size_t bytes) const { return bytes <= piece_bytes_; }
  // Makes every piece hold `bytes` at least. Only while all are free. RESOURCE_EXHAUSTED if the GPU
  // has no room; then it is as before.
  absl::Status Reserve(std::size_t bytes);

  // Another way to allocate, from now on: what there is moves there. Only while all are free. Fails
  // as Reserve does.
  absl::Status SetAllocator(const Allocator& allocator);

  // The next piece can be taken for a bucket of `bytes`. Not while there are pieces in use, if it
  // is larger than all before it.
  bool CanTake(std::size_t bytes) const;
  // Then. They are set `free` again in the order in which they are taken.
  CudaStagingPiece* Take(std::size_t bytes);
  // The next bucket is the first. Only while all are free.
  void Restart();

  CUdeviceptr address() const { return memory_; }  // 0: nothing has been reserved yet
  std::size_t bytes() const { return piece_bytes_ * kPieces; }

 private:
  absl::Status Allocate(std::size_t piece_bytes, const Allocator& allocator);
  // Of an allocation of `wanted` bytes that has failed with `status`.
  absl::Status WhyNot(std::size_t wanted, const absl::Status& status) const;
  void Free();
  bool AllFree() const;

  const CudaDriver* const driver_;
  Allocator allocator_;
  CUdeviceptr memory_ = 0;
  std::size_t piece_bytes_ = 0;  // that each may have
  std::size_t stride_ = 0;       // from one to the next: of the largest bucket so far
  std::size_t next_ = 0;
  std::array<CudaStagingPiece, kPieces> pieces_;
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_CUDA_STAGING_H_
