#include "daemon/telemetry/step_timeline.h"

#include <algorithm>

namespace gradsync::daemon {
namespace {

std::size_t Capacity(std::size_t timestamps_per_step) {
  const std::size_t fitting =
      StepTimeline::kMaxTimestamps / std::max<std::size_t>(1, timestamps_per_step);
  return std::clamp<std::size_t>(fitting, 1, StepTimeline::kMaxSteps);
}

}  // namespace

StepTimeline::StepTimeline(std::size_t buckets, std::size_t ranks)
    : StepTimeline(buckets, ranks, Capacity(buckets * (ranks + 2))) {}

StepTimeline::StepTimeline(std::size_t buckets, std::size_t ranks, std::size_t capacity)
    : buckets_(buckets),
      ranks_(ranks),
      headers_(capacity),
      timestamps_(capacity * buckets * (ranks + 2)) {}

std::uint64_t StepTimeline::BytesFor(std::size_t buckets, std::size_t ranks) {
  const std::uint64_t per_step = buckets * (ranks + 2);
  return sizeof(StepTimeline) +
         Capacity(per_step) * (sizeof(Header) + per_step * sizeof(std::uint64_t));
}

std::uint64_t StepTimeline::bytes() const {
  return sizeof(StepTimeline) + headers_.size() * sizeof(Header) +
         timestamps_.size() * sizeof(std::uint64_t);
}

std::unique_ptr<StepTimeline> StepTimeline::LastWithin(std::uint64_t bytes) const {
  const std::uint64_t per_step = sizeof(Header) + buckets_ * BucketStride() * sizeof(std::uint64_t);
  if (size() == 0 || bytes < sizeof(StepTimeline) + per_step) return nullptr;
  const std::uint64_t fitting = (bytes - sizeof(StepTimeline)) / per_step;
  const auto steps = static_cast<std::size_t>(std::min<std::uint64_t>(fitting, size()));
  std::unique_ptr<StepTimeline> last(new StepTimeline(buckets_, ranks_, steps));
  for (const StepTimes& times : Last(steps)) last->Append(times);
  return last;
}

void StepTimeline::Append(const StepTimes& times) {
  const std::size_t slot = appended_++ % headers_.size();
  headers_[slot] = {times.step, times.complete, times.commit_ns};
  std::uint64_t* out = timestamps_.data() + slot * buckets_ * BucketStride();
  for (std::size_t bucket = 0; bucket < buckets_; ++bucket, out += BucketStride()) {
    std::fill_n(out, BucketStride(), 0);
    if (bucket >= times.buckets.size()) continue;
    const BucketTimes& from = times.buckets[bucket];
    out[0] = from.start_ns;
    out[1] = from.finish_ns;
    std::copy_n(from.ready_ns.begin(), std::min(ranks_, from.ready_ns.size()), out + 2);
  }
}

std::vector<StepTimes> StepTimeline::Last(std::size_t steps) const {
  const std::size_t wanted = std::min(steps, size());
  std::vector<StepTimes> result(wanted);
  for (std::size_t i = 0; i < wanted; ++i) {
    const std::size_t slot = (appended_ - wanted + i) % headers_.size();
    StepTimes& to = result[i];
    to.step = headers_[slot].step;
    to.complete = headers_[slot].complete;
    to.commit_ns = headers_[slot].commit_ns;
    to.buckets.resize(buckets_);
    const std::uint64_t* in = timestamps_.data() + slot * buckets_ * BucketStride();
    for (BucketTimes& bucket : to.buckets) {
      bucket.start_ns = in[0];
      bucket.finish_ns = in[1];
      bucket.ready_ns.assign(in + 2, in + BucketStride());
      in += BucketStride();
    }
  }
  return result;
}

std::size_t StepTimeline::size() const {
  return static_cast<std::size_t>(std::min<std::uint64_t>(appended_, headers_.size()));
}

}  // namespace gradsync::daemon
