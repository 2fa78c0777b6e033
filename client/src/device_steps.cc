#include "client/src/device_steps.h"

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace gradsync::client {

DeviceSteps::DeviceSteps(std::shared_ptr<StepClient> steps, std::unique_ptr<StreamHandoff> handoff)
    : steps_(std::move(steps)), handoff_(std::move(handoff)) {}

absl::Status DeviceSteps::MarkReady(std::uint64_t step, std::size_t bucket,
                                    absl::Span<const CudaStream> streams) {
  const absl::Time start = absl::Now();
  absl::MutexLock lock(&mutex_);
  std::vector<ByteSpan> zeros;
  if (auto status = steps_->AdmitMark(step, bucket, &zeros); !status.ok()) return status;
  auto status = handoff_->EnqueueReady(step, {bucket}, zeros, streams);
  if (!status.ok()) return steps_->errors().With(status, step, bucket);
  // Admits it once more: the step may be void by now, or the session may have ended.
  return steps_->CommitMark(step, bucket, start);
}

absl::Status DeviceSteps::FinishStep(std::uint64_t step, const std::vector<bool>& used,
                                     absl::Span<const CudaStream> streams) {
  const absl::Time start = absl::Now();
  absl::MutexLock lock(&mutex_);
  std::vector<std::size_t> rest;
  std::vector<ByteSpan> zeros;
  if (auto status = steps_->AdmitFinish(step, used, &rest, &zeros); !status.ok()) return status;
  if (!rest.empty()) {
    auto status = handoff_->EnqueueReady(step, rest, zeros, streams);
    if (!status.ok()) return steps_->errors().With(status, step, std::nullopt);
  }
  // Admits it once more, as above.
  return steps_->CommitFinish(step, used, start);
}

absl::Status DeviceSteps::WaitOnStream(std::uint64_t step, std::optional<std::size_t> bucket,
                                       CudaStream stream) {
  absl::MutexLock lock(&mutex_);
  std::vector<std::size_t> waited;
  if (auto status = steps_->AdmitStreamWait(step, bucket, &waited); !status.ok()) return status;
  return steps_->errors().With(handoff_->EnqueueWait(step, waited, stream), step, bucket);
}

void DeviceSteps::Close() {
  absl::MutexLock lock(&mutex_);
  if (handoff_ == nullptr) return;
  steps_->BeginRelease();
  handoff_.reset();  // waits for the streams
  steps_->EndRelease();
}

}  // namespace gradsync::client
