#include "tests/cuda/cuda_rank.h"

#include <cstring>
#include <utility>

#include "tests/fakes/control.h"
#include "tests/fakes/cuda_process.h"

namespace gradsync {
namespace {

CUdeviceptr AddressOf(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

LayoutSpec CudaLayout(int gpu, std::size_t buckets, std::size_t count) {
  LayoutSpec spec;
  spec.explicit_buckets.assign(buckets, {DataType::kFloat32, count});
  spec.device = fakes::GpuUuid(gpu);
  return spec;
}

CudaRank::CudaRank(int gpu, std::unique_ptr<Session> session)
    : gpu_(gpu),
      context_(fakes::EnterContext(gpu)),
      stream_(fakes::MakeStream()),
      session_(std::move(session)) {}

absl::Status CudaRank::Join(const SessionOptions& options) {
  auto session = Session::Join(options);
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  return absl::OkStatus();
}

absl::Status CudaRank::Register(const LayoutSpec& spec) {
  DropLayout();
  auto layout = session_->RegisterLayout(spec);
  if (!layout.ok()) return layout.status();
  layout_ = *std::move(layout);
  return absl::OkStatus();
}

absl::Status CudaRank::Replace(const LayoutSpec& spec) {
  auto layout = session_->ReplaceLayout(*layout_, spec);
  if (!layout.ok()) return layout.status();
  layout_ = *std::move(layout);
  return absl::OkStatus();
}

void CudaRank::End() {
  DropLayout();
  session_.reset();
}

void CudaRank::Enter() const { CUDA_OK(cuCtxSetCurrent(context_)); }

void CudaRank::Write(std::size_t bucket, float value) {
  Enter();
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const BucketView view = layout_->bucket(bucket);
  CUDA_OK(cuMemsetD32Async(AddressOf(view.data), bits, view.count, stream_));
}

absl::Status CudaRank::Step(std::uint64_t step, float value) {
  for (std::size_t bucket = 0; bucket < layout_->bucket_count(); ++bucket) {
    Write(bucket, value + static_cast<float>(bucket));
    if (absl::Status marked = layout_->MarkReady(step, bucket, {stream_}); !marked.ok()) {
      return marked;
    }
  }
  if (absl::Status ended = layout_->EndStep(step); !ended.ok()) return ended;
  return layout_->WaitOnStream(step, stream_);
}

std::vector<float> CudaRank::Read(std::size_t bucket) {
  Enter();
  const BucketView view = layout_->bucket(bucket);
  return fakes::ReadFloats(AddressOf(view.data), view.count, stream_);
}

float CudaRank::Verdict(std::uint64_t step) {
  Enter();
  return fakes::ReadFloats(AddressOf(layout_->device_verdict(step)), 1, stream_)[0];
}

absl::StatusOr<StepResult> CudaRank::WaitStep(std::uint64_t step) {
  return layout_->WaitStep(step, kCudaPatience);
}

}  // namespace gradsync
