#include "tools/bench/gradsync_contestant.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tools/bench/clocks.h"

namespace gradsync::bench {
namespace {

// A bench that hangs fails after this time.
constexpr absl::Duration kTimeout = absl::Minutes(1);

}  // namespace

absl::Status GradsyncContestant::Join(std::size_t bytes, const std::string& device) {
  SessionOptions session_options;
  session_options.socket = options_.socket;
  session_options.job_id = absl::StrCat("bench-", bytes);
  session_options.rank = options_.rank;
  session_options.world_size = options_.ranks;
  session_options.coordinator = options_.coordinator;
  session_options.step_timeout = kTimeout;
  session_options.connect_timeout = absl::Seconds(20);
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Join(session_options);
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  LayoutSpec spec;
  spec.explicit_buckets = {{options_.dtype, bytes / ItemSize(options_.dtype)}};
  spec.timeout = kTimeout;
  spec.device = device;
  absl::StatusOr<std::unique_ptr<Layout>> layout = session_->RegisterLayout(spec);
  if (!layout.ok()) return layout.status();
  layout_ = *std::move(layout);
  step_ = layout_->next_step();
  return absl::OkStatus();
}

absl::Status GradsyncContestant::AllReduce(Turn* turn) {
  absl::Status status = layout_->MarkReady(step_, kBucket);
  turn->marked_ns = MonotonicNs();
  if (!status.ok()) return status;
  return layout_->WaitBucket(step_, kBucket, kTimeout);
}

absl::Status GradsyncContestant::EndStep(Turn* turn) {
  absl::Status status = layout_->EndStep(step_);
  if (!status.ok()) return status;
  absl::StatusOr<StepResult> result = layout_->WaitStep(step_, kTimeout);
  if (!result.ok()) return result.status();
  step_ = layout_->next_step();
  const BucketTimes& bucket = result->buckets.at(kBucket);
  turn->ready_ns =
      static_cast<std::int64_t>(*std::max_element(bucket.ready_ns.begin(), bucket.ready_ns.end()));
  turn->start_ns = static_cast<std::int64_t>(bucket.start_ns);
  turn->finish_ns = static_cast<std::int64_t>(bucket.finish_ns);
  return absl::OkStatus();
}

absl::Status GradsyncContestant::TearDown() {
  absl::Status status = session_->Leave();
  layout_.reset();
  session_.reset();
  return status;
}

}  // namespace gradsync::bench
