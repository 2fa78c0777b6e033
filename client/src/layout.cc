#include "client/src/layout.h"

#include <utility>

#include "client/src/fork_guard.h"

namespace gradsync::client {
namespace {

// Views of the arena, and the steps. Refuses everything but the views in a forked child.
class ArenaLayout final : public Layout {
 public:
  ArenaLayout(std::string name, std::uint64_t fingerprint, LayoutPlan plan,
              std::shared_ptr<MappedMemory> arena, std::shared_ptr<StepSequence> steps)
      : name_(std::move(name)),
        fingerprint_(fingerprint),
        plan_(std::move(plan)),
        arena_(std::move(arena)),
        steps_(std::move(steps)) {}

  const std::string& name() const override { return name_; }
  std::uint64_t fingerprint() const override { return fingerprint_; }
  std::size_t bucket_count() const override { return plan_.buckets.size(); }
  std::size_t parameter_count() const override { return plan_.gradients.size(); }
  BucketView bucket(std::size_t bucket) const override {
    const PlannedSpan& span = plan_.buckets[bucket];
    return {span.dtype, span.count, arena_->data() + span.offset};
  }
  GradientView gradient(std::size_t parameter) const override {
    const PlannedSpan& span = plan_.gradients[parameter];
    return {span.dtype, span.count, span.bucket, arena_->data() + span.offset};
  }
  std::shared_ptr<const void> Mapping() const override { return {arena_, arena_->data()}; }
  std::uint64_t next_step() const override { return steps_->next_step(); }

  absl::Status MarkUnused(std::uint64_t step, std::size_t parameter) override {
    return InForkedChild() ? ForkedError() : steps_->MarkUnused(step, parameter);
  }
  absl::Status MarkReady(std::uint64_t step, std::size_t bucket) override {
    return InForkedChild() ? ForkedError() : steps_->MarkReady(step, bucket);
  }
  absl::Status EndStep(std::uint64_t step, const std::vector<bool>& used) override {
    return InForkedChild() ? ForkedError() : steps_->EndStep(step, used);
  }
  absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used) override {
    return InForkedChild() ? ForkedError() : steps_->FinishStep(step, used);
  }
  absl::Status AbandonStep(std::uint64_t step, std::string_view reason) override {
    if (InForkedChild()) return ForkedError();
    return steps_->AbandonStep(step, {reason.data(), reason.size()});
  }
  absl::Status WaitBucket(std::uint64_t step, std::size_t bucket, absl::Duration timeout) override {
    return InForkedChild() ? ForkedError() : steps_->WaitBucket(step, bucket, timeout);
  }
  absl::StatusOr<StepResult> WaitStep(std::uint64_t step, absl::Duration timeout) override {
    if (InForkedChild()) return ForkedError();
    return steps_->WaitStep(step, timeout);
  }

  const std::shared_ptr<StepSequence>& steps() const { return steps_.get(); }

 private:
  // Constant after construction.
  const std::string name_;
  const std::uint64_t fingerprint_;
  const LayoutPlan plan_;
  const std::shared_ptr<MappedMemory> arena_;

  // Own synchronization.
  const ParentsReference<StepSequence> steps_;
};

}  // namespace

std::unique_ptr<Layout> NewLayout(std::string name, std::uint64_t fingerprint, LayoutPlan plan,
                                  std::shared_ptr<MappedMemory> arena,
                                  std::shared_ptr<StepSequence> steps) {
  return std::make_unique<ArenaLayout>(std::move(name), fingerprint, std::move(plan),
                                       std::move(arena), std::move(steps));
}

absl::StatusOr<std::shared_ptr<StepSequence>> StepsOf(const Layout& layout) {
  if (InForkedChild()) return ForkedError();
  return static_cast<const ArenaLayout&>(layout).steps();
}

}  // namespace gradsync::client
