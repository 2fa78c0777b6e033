#include "client/src/layout.h"

#include <optional>
#include <string>
#include <utility>

#include "client/src/fork_guard.h"

namespace gradsync::client {
namespace {

// Views of the arena, and the steps. In a forked child only the views work.
class ArenaLayout final : public Layout {
 public:
  ArenaLayout(const LayoutSpec& spec, std::uint64_t fingerprint, LayoutPlan plan,
              std::shared_ptr<std::byte> arena, std::shared_ptr<StepClient> steps,
              std::shared_ptr<DeviceSteps> device_steps)
      : name_(spec.name),
        device_(spec.device),
        fingerprint_(fingerprint),
        has_buffers_(spec.buffer_bytes > 0),
        plan_(std::move(plan)),
        arena_(std::move(arena)),
        steps_(std::move(steps)),
        device_steps_(std::move(device_steps)) {}
  ~ArenaLayout() override {
    if (InForkedChild()) return;
    steps_->Drop();
    if (on_device()) device_steps_->Close();
  }

  const std::string& name() const override { return name_; }
  const std::string& device() const override { return device_; }
  std::uint64_t fingerprint() const override { return fingerprint_; }
  std::size_t bucket_count() const override { return plan_.buckets.size(); }
  std::size_t parameter_count() const override { return plan_.gradients.size(); }
  BucketView bucket(std::size_t bucket) const override {
    const PlannedSpan& span = plan_.buckets[bucket];
    return {span.dtype, span.count, arena_.get() + span.offset};
  }
  BucketView buffers() const override {
    if (!has_buffers_) return {DataType::kUint8, 0, nullptr};
    return bucket(plan_.buckets.size() - 1);
  }
  GradientView gradient(std::size_t parameter) const override {
    const PlannedSpan& span = plan_.gradients[parameter];
    return {span.dtype, span.count, span.bucket, arena_.get() + span.offset};
  }
  std::shared_ptr<const void> Mapping() const override { return arena_; }
  std::uint64_t first_step() const override { return steps_->first_step(); }
  std::uint64_t next_step() const override { return steps_->next_step(); }

  void SetPosition(Position position) override {
    if (!InForkedChild()) steps_->SetPosition(position);
  }
  absl::Status MarkUnused(std::uint64_t step, std::size_t parameter) override {
    return InForkedChild() ? ForkedError() : steps_->MarkUnused(step, parameter);
  }
  absl::Status MarkReady(std::uint64_t step, std::size_t bucket) override {
    return InForkedChild() ? ForkedError() : steps_->MarkReady(step, bucket);
  }
  absl::Status MarkReady(std::uint64_t step, std::size_t bucket,
                         absl::Span<const CudaStream> streams) override {
    if (InForkedChild()) return ForkedError();
    if (!on_device()) return steps_->errors().NeedsNoStreamError(step, "MarkReady");
    return device_steps_->MarkReady(step, bucket, streams);
  }
  absl::Status EndStep(std::uint64_t step, const std::vector<bool>& used) override {
    return InForkedChild() ? ForkedError() : steps_->EndStep(step, used);
  }
  absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used) override {
    return InForkedChild() ? ForkedError() : steps_->FinishStep(step, used);
  }
  absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used,
                          absl::Span<const CudaStream> streams) override {
    if (InForkedChild()) return ForkedError();
    if (!on_device()) return steps_->errors().NeedsNoStreamError(step, "FinishStep");
    return device_steps_->FinishStep(step, used, streams);
  }
  absl::Status AbandonStep(std::uint64_t step, std::string_view reason) override {
    if (InForkedChild()) return ForkedError();
    return steps_->AbandonStep(step, {reason.data(), reason.size()});
  }
  absl::Status WaitOnStream(std::uint64_t step, std::size_t bucket, CudaStream stream) override {
    return WaitOnStream(step, std::optional<std::size_t>(bucket), stream);
  }
  absl::Status WaitOnStream(std::uint64_t step, CudaStream stream) override {
    return WaitOnStream(step, std::nullopt, stream);
  }
  const float* device_verdict(std::uint64_t step) const override {
    if (device_.empty()) return nullptr;
    return reinterpret_cast<const float*>(arena_.get() + plan_.verdict_offset) + step % 2;
  }
  absl::Status WaitBucket(std::uint64_t step, std::size_t bucket, absl::Duration timeout) override {
    return InForkedChild() ? ForkedError() : steps_->WaitBucket(step, bucket, timeout);
  }
  absl::StatusOr<StepResult> WaitStep(std::uint64_t step, absl::Duration timeout) override {
    if (InForkedChild()) return ForkedError();
    return steps_->WaitStep(step, timeout);
  }

  absl::Status Release() override { return InForkedChild() ? ForkedError() : steps_->Release(); }

  const std::shared_ptr<StepClient>& steps() const { return steps_.get(); }

 private:
  bool on_device() const { return device_steps_.get() != nullptr; }

  absl::Status WaitOnStream(std::uint64_t step, std::optional<std::size_t> bucket,
                            CudaStream stream) {
    if (InForkedChild()) return ForkedError();
    if (!on_device()) return steps_->errors().NeedsNoStreamError(step, "WaitOnStream");
    return device_steps_->WaitOnStream(step, bucket, stream);
  }

  // Constant after construction.
  const std::string name_;
  const std::string device_;
  const std::uint64_t fingerprint_;
  const bool has_buffers_;
  const LayoutPlan plan_;
  const std::shared_ptr<std::byte> arena_;

  // Own synchronization.
  const ParentsReference<StepClient> steps_;
  const ParentsReference<DeviceSteps> device_steps_;  // null in host memory
};

}  // namespace

std::unique_ptr<Layout> NewLayout(const LayoutSpec& spec, std::uint64_t fingerprint,
                                  LayoutPlan plan, std::shared_ptr<std::byte> arena,
                                  std::shared_ptr<StepClient> steps,
                                  std::shared_ptr<DeviceSteps> device_steps) {
  return std::make_unique<ArenaLayout>(spec, fingerprint, std::move(plan), std::move(arena),
                                       std::move(steps), std::move(device_steps));
}

absl::StatusOr<std::shared_ptr<StepClient>> StepsOf(const Layout& layout) {
  if (InForkedChild()) return ForkedError();
  return static_cast<const ArenaLayout&>(layout).steps();
}

}  // namespace gradsync::client
