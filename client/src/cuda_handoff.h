// The hand-off by stream memory operations on the semaphore page. Thread-compatible, as
// StreamHandoff says.

#ifndef CLIENT_SRC_CUDA_HANDOFF_H_
#define CLIENT_SRC_CUDA_HANDOFF_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/src/cuda_arena.h"
#include "client/src/cuda_context.h"
#include "client/src/mapped_memory.h"
#include "client/src/stream_handoff.h"

namespace gradsync::client {

class CudaHandoff final : public StreamHandoff {
 public:
  // Registers `semaphores` with the driver. `verdict_offset`: bytes from the arena's start to
  // `float verdict[2]`.
  static absl::StatusOr<std::unique_ptr<CudaHandoff>> Open(
      std::shared_ptr<CudaContext> context, std::shared_ptr<CudaArena> arena,
      std::uint64_t verdict_offset, std::shared_ptr<MappedMemory> semaphores);
  ~CudaHandoff() override;

  absl::Status EnqueueReady(std::uint64_t step, absl::Span<const std::size_t> buckets,
                            absl::Span<const ByteSpan> zeros,
                            absl::Span<void* const> streams) override;
  absl::Status EnqueueWait(std::uint64_t step, absl::Span<const std::size_t> buckets,
                           void* stream) override;

 private:
  CudaHandoff(std::shared_ptr<CudaContext> context, std::shared_ptr<CudaArena> arena,
              std::uint64_t verdict_offset, std::shared_ptr<MappedMemory> semaphores);

  absl::Status CheckNotCapturing(CUstream stream) const;
  CUdeviceptr verdict_address(std::uint64_t step) const;
  CUevent voided(std::uint64_t step) const { return voided_[step % 2]; }

  // Constant once Open has returned. The context outlives everything that was made in it.
  const std::shared_ptr<CudaContext> context_;
  const CudaDriver& driver_;
  const std::shared_ptr<CudaArena> arena_;
  const std::uint64_t verdict_offset_;
  const std::shared_ptr<MappedMemory> semaphores_;
  CUdeviceptr words_ = 0;  // the semaphores' address on the device
  // Makes the first stream wait for every other stream, one after the other: each wait uses the
  // record just before it.
  CUevent join_ = nullptr;
  // Recorded after a step's verdict was set to void, by step % 2.
  CUevent voided_[2] = {nullptr, nullptr};

  std::uint64_t last_begun_ = 0;  // step whose verdict was made void last
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_CUDA_HANDOFF_H_
