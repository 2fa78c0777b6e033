#include "client/src/cuda_handoff.h"

#include <utility>

#include "absl/memory/memory.h"
#include "client/src/device_layout.h"
#include "client/src/error.h"
#include "client/src/fork_guard.h"
#include "gradsync/shared_memory.h"

namespace gradsync::client {
namespace {

constexpr std::uint32_t kVoidBits = 0x3F800000;  // 1.0f

constexpr std::size_t SemaphoreOffset(std::size_t bucket) {
  return sizeof(SemaphorePageHeader) + bucket * sizeof(BucketSemaphore);
}
// std::atomic<std::uint64_t> has the representation of its value (shared_memory.h).
constexpr std::size_t DoneOffset(std::size_t bucket) { return SemaphoreOffset(bucket); }
constexpr std::size_t ReadyOffset(std::size_t bucket) {
  return SemaphoreOffset(bucket) + sizeof(std::uint64_t);
}

}  // namespace

CudaHandoff::CudaHandoff(std::shared_ptr<CudaContext> context, std::shared_ptr<CudaArena> arena,
                         std::uint64_t verdict_offset, std::shared_ptr<MappedMemory> semaphores)
    : context_(std::move(context)),
      driver_(context_->driver()),
      arena_(std::move(arena)),
      verdict_offset_(verdict_offset),
      semaphores_(std::move(semaphores)) {}

absl::StatusOr<std::unique_ptr<CudaHandoff>> CudaHandoff::Open(
    std::shared_ptr<CudaContext> context, std::shared_ptr<CudaArena> arena,
    std::uint64_t verdict_offset, std::shared_ptr<MappedMemory> semaphores) {
  auto handoff = absl::WrapUnique(
      new CudaHandoff(std::move(context), std::move(arena), verdict_offset, std::move(semaphores)));
  const CudaDriver& driver = handoff->driver_;
  const CudaContext::Scope scope(*handoff->context_);
  if (!scope.status().ok()) return scope.status();
  for (CUevent* const event : {&handoff->join_, &handoff->voided_[0], &handoff->voided_[1]}) {
    if (auto status =
            driver.Check(driver.cuEventCreate(event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        !status.ok()) {
      return status;
    }
  }
  std::byte* const pages = handoff->semaphores_->data();
  if (auto status = driver.Check(
          driver.cuMemHostRegister(pages, handoff->semaphores_->size(),
                                   CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
          "cuMemHostRegister");
      !status.ok()) {
    return status;
  }
  if (auto status = driver.Check(driver.cuMemHostGetDevicePointer(&handoff->words_, pages, 0),
                                 "cuMemHostGetDevicePointer");
      !status.ok()) {
    driver.cuMemHostUnregister(pages);
    handoff->words_ = 0;
    return status;
  }
  return handoff;
}

CudaHandoff::~CudaHandoff() {
  if (InForkedChild()) return;
  const CudaContext::Scope scope(*context_);
  if (!scope.status().ok()) return;
  // Streams may still have to write a word.
  if (words_ != 0 && driver_.cuCtxSynchronize() == CUDA_SUCCESS) {
    driver_.cuMemHostUnregister(semaphores_->data());
  }
  for (CUevent event : {join_, voided_[0], voided_[1]}) {
    if (event != nullptr) driver_.cuEventDestroy(event);
  }
}

absl::Status CudaHandoff::CheckNotCapturing(CUstream stream) const {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  if (auto status =
          driver_.Check(driver_.cuStreamIsCapturing(stream, &capture), "cuStreamIsCapturing");
      !status.ok()) {
    return status;
  }
  if (capture == CU_STREAM_CAPTURE_STATUS_NONE) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kCapturing,
                   "the stream is being captured into a CUDA graph, which would repeat this step's "
                   "number at every launch; capture the passes without gradsync's calls");
}

absl::Status CudaHandoff::EnqueueReady(std::uint64_t step, absl::Span<const std::size_t> buckets,
                                       absl::Span<const ByteSpan> zeros,
                                       absl::Span<void* const> streams) {
  if (streams.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     "the layout is on a GPU; say on which streams its gradients are written");
  }
  const CudaContext::Scope scope(*context_);
  if (!scope.status().ok()) return scope.status();
  for (void* const stream : streams) {
    if (auto status = CheckNotCapturing(static_cast<CUstream>(stream)); !status.ok()) return status;
  }
  const auto first = static_cast<CUstream>(streams[0]);
  absl::Status status;
  const auto enqueue = [&](CUresult result, const char* call) {
    if (status.ok()) status = driver_.Check(result, call);
    return status.ok();
  };
  for (void* const stream : streams.subspan(1)) {
    // The write of a ready word is ordered only after its own stream.
    if (!enqueue(driver_.cuEventRecord(join_, static_cast<CUstream>(stream)), "cuEventRecord") ||
        !enqueue(driver_.cuStreamWaitEvent(first, join_, CU_EVENT_WAIT_DEFAULT),
                 "cuStreamWaitEvent")) {
      return status;
    }
  }
  if (step != last_begun_) {
    if (!enqueue(driver_.cuMemsetD32Async(verdict_address(step), kVoidBits, 1, first),
                 "cuMemsetD32Async") ||
        !enqueue(driver_.cuEventRecord(voided(step), first), "cuEventRecord")) {
      return status;
    }
    last_begun_ = step;
  }
  for (const ByteSpan& zero : zeros) {
    if (zero.bytes > 0 &&
        !enqueue(driver_.cuMemsetD8Async(arena_->address() + zero.offset, 0, zero.bytes, first),
                 "cuMemsetD8Async")) {
      return status;
    }
  }
  for (const std::size_t bucket : buckets) {
    if (!enqueue(driver_.cuStreamWriteValue64(first, words_ + ReadyOffset(bucket), step,
                                              CU_STREAM_WRITE_VALUE_DEFAULT),
                 "cuStreamWriteValue64")) {
      return status;
    }
  }
  return status;
}

absl::Status CudaHandoff::EnqueueWait(std::uint64_t step, absl::Span<const std::size_t> buckets,
                                      void* stream) {
  const CudaContext::Scope scope(*context_);
  if (!scope.status().ok()) return scope.status();
  const auto waiting = static_cast<CUstream>(stream);
  if (auto status = CheckNotCapturing(waiting); !status.ok()) return status;
  // A poisoned word may release this stream before another stream has set the verdict to void.
  if (auto status =
          driver_.Check(driver_.cuStreamWaitEvent(waiting, voided(step), CU_EVENT_WAIT_DEFAULT),
                        "cuStreamWaitEvent");
      !status.ok()) {
    return status;
  }
  for (const std::size_t bucket : buckets) {
    if (auto status =
            driver_.Check(driver_.cuStreamWaitValue64(waiting, words_ + DoneOffset(bucket), step,
                                                      CU_STREAM_WAIT_VALUE_GEQ),
                          "cuStreamWaitValue64");
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

CUdeviceptr CudaHandoff::verdict_address(std::uint64_t step) const {
  return arena_->address() + verdict_offset_ + step % 2 * sizeof(float);
}

absl::StatusOr<LayoutMemory> MapDeviceLayout(const std::shared_ptr<CudaContext>& context,
                                             const LayoutPlan& plan, int arena,
                                             std::shared_ptr<MappedMemory> semaphores) {
  auto mapped = plan.memory == ArenaMemory::kCudaVmm
                    ? CudaArena::Import(context, arena, plan.arena_bytes)
                    : CudaArena::OpenIpc(context, plan.ipc_handle);
  if (!mapped.ok()) return mapped.status();
  auto handoff = CudaHandoff::Open(context, *mapped, plan.verdict_offset, std::move(semaphores));
  if (!handoff.ok()) return handoff.status();
  auto* const address = reinterpret_cast<std::byte*>((*mapped)->address());
  return LayoutMemory{{*std::move(mapped), address}, *std::move(handoff)};
}

}  // namespace gradsync::client
