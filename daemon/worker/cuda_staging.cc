#include "daemon/worker/cuda_staging.h"

#include <algorithm>
#include <cassert>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

// The alignment of pieces, at which the kernels and NCCL are fastest.
constexpr std::size_t kAlignment = 4096;

std::size_t Aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The unit in which GPUs allocate memory.
constexpr std::size_t kGranule = std::size_t{2} << 20;

CudaStagingPool::Allocator DriverAllocator(const CudaDriver* driver) {
  return {[driver](CUdeviceptr* address, std::size_t bytes) {
            return driver->cuMemAlloc(address, bytes);
          },
          [driver](CUdeviceptr address) { driver->cuMemFree.Result(address); }};
}

}  // namespace

CudaStagingPool::CudaStagingPool(const CudaContext* context)
    : driver_(context->driver()), allocator_(DriverAllocator(context->driver())) {}

CudaStagingPool::~CudaStagingPool() {
  Free();
  for (CudaStagingPiece& piece : pieces_) {
    for (CUevent event : {piece.combined, piece.collected, piece.written}) {
      if (event != nullptr) driver_->cuEventDestroy.Result(event);
    }
    if (piece.report != nullptr) driver_->cuMemFreeHost.Result(piece.report);
  }
}

absl::Status CudaStagingPool::Open() {
  absl::Status status;
  for (CudaStagingPiece& piece : pieces_) {
    for (CUevent* const event : {&piece.combined, &piece.collected, &piece.written}) {
      if (status.ok()) status = driver_->cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
    }
    void* memory = nullptr;
    if (status.ok()) {
      status =
          driver_->cuMemHostAlloc(&memory, sizeof(CudaBucketReport), CU_MEMHOSTALLOC_DEVICEMAP);
    }
    if (!status.ok()) return status;
    piece.report = new (memory) CudaBucketReport();
    status = driver_->cuMemHostGetDevicePointer(&piece.report_address, memory, 0);
  }
  return status;
}

absl::Status CudaStagingPool::Reserve(std::size_t bytes) {
  return Holds(bytes) ? absl::OkStatus() : Allocate(Aligned(bytes), allocator_);
}

absl::Status CudaStagingPool::SetAllocator(const Allocator& allocator) {
  if (piece_bytes_ > 0) {
    if (const absl::Status status = Allocate(piece_bytes_, allocator); !status.ok()) return status;
  }
  allocator_ = allocator;
  return absl::OkStatus();
}

absl::Status CudaStagingPool::Allocate(std::size_t piece_bytes, const Allocator& allocator) {
  const std::size_t wanted = piece_bytes * kPieces;
  CUdeviceptr memory = 0;
  const absl::Status status = allocator.allocate(&memory, wanted);
  if (!status.ok()) return AllocationError(wanted, status);
  Free();
  memory_ = memory;
  piece_bytes_ = piece_bytes;
  return absl::OkStatus();
}

absl::Status CudaStagingPool::AllocationError(std::size_t wanted,
                                              const absl::Status& status) const {
  std::size_t free = 0;
  std::size_t total = 0;
  const bool known = driver_->cuMemGetInfo.Result(&free, &total) == CUDA_SUCCESS;
  // NCCL reports only that a call of CUDA has failed.
  const bool lacks = known && free < (wanted + kGranule - 1) / kGranule * kGranule;
  if (!lacks && !absl::IsResourceExhausted(status)) return status;
  return MakeError(
      absl::StatusCode::kResourceExhausted, reason::kGpuOutOfMemory,
      absl::StrCat("summing the largest bucket needs ", wanted, " bytes of the GPU, which has ",
                   free, " free of ", total, "; smaller buckets need less"));
}

void CudaStagingPool::Free() {
  if (memory_ != 0) allocator_.free(std::exchange(memory_, 0));
}

bool CudaStagingPool::AllFree() const {
  return std::all_of(pieces_.begin(), pieces_.end(),
                     [](const CudaStagingPiece& piece) { return piece.free; });
}

bool CudaStagingPool::CanTake(std::size_t bytes) const {
  return Holds(bytes) && (AllFree() || (Aligned(bytes) <= stride_ && pieces_[next_].free));
}

CudaStagingPiece* CudaStagingPool::Take(std::size_t bytes) {
  assert(CanTake(bytes));
  stride_ = std::max(stride_, Aligned(bytes));
  CudaStagingPiece& piece = pieces_[next_];
  piece.address = memory_ + next_ * stride_;
  piece.free = false;
  next_ = (next_ + 1) % kPieces;
  return &piece;
}

void CudaStagingPool::Restart() {
  stride_ = 0;
  next_ = 0;
}

}  // namespace gradsync::daemon
