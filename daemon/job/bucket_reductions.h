// The reductions of a layout's buckets.

#ifndef DAEMON_JOB_BUCKET_REDUCTIONS_H_
#define DAEMON_JOB_BUCKET_REDUCTIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/membership.h"
#include "daemon/job/running_step.h"
#include "daemon/reduce/gradient_stats.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

class LayoutChannel;

// One ReduceOperation for each bucket. It is built once and used again in every step, so that a
// step allocates nothing. Each operation signals its done words when it is done.
//
// Externally synchronized: guarded by the job's lock. Owns the operations, so this object lives
// until none is in flight.
class BucketReductions {
 public:
  // Called by the reducer without the job's lock: on a thread of its own, or within Reduce().
  using OnReduced = std::function<void(LayoutChannel*, std::size_t bucket, const ReduceTimes&,
                                       const absl::Status& failure)>;
  // All references outlive this object. `reduced` is called with `layout`.
  BucketReductions(const LayoutPlan& plan, const LayoutAgreement& agreement, const JobTerms& terms,
                   const Membership& members, LayoutChannel* layout, OnReduced reduced);

  const ReduceOperation& operator[](std::size_t bucket) const {
    return buckets_[bucket]->operation;
  }

  // Call it when the ranks that take part, or their memory, have changed. The next Prepare() of
  // each bucket looks them up again. A reduction in flight keeps the buffers that it has.
  void Rebind();
  // The operation that reduces the bucket in `step`, ready to be submitted. Requires that the
  // bucket is not in flight, and that every rank that takes part is ready in the bucket.
  ReduceOperation* Prepare(std::size_t bucket, const RunningStep& step);

  // The statistics that the last reductions measured, by bucket. A sum of squares is NaN if it is
  // not measured, and 0 for the bucket of the model's buffers, which has no gradients.
  std::vector<GradientStats> Stats() const;
  // The argument of Reducer::GiveUp(), for the first call in a step; nullopt in later calls. Only
  // for a layout on GPUs.
  std::optional<GivenUpStep> GiveUp(std::uint64_t step);

 private:
  struct Bucket {
    ReduceOperation operation;
    std::vector<SemaphorePage*> semaphores;  // of the ranks on this node that take part
    bool bound = false;                      // `operation` and `semaphores` are up to date
  };

  // Sets the buffers of a bucket's operation to those of the sessions whose gradients the bucket
  // has.
  void Bind(std::size_t index, const RunningStep& step);
  bool HasBuffers(std::size_t index) const {
    return agreement_.spec().BufferBucket(plan_.buckets.size()) == index;
  }
  // How the bucket is reduced: as the layout says, but the model's buffers are summed.
  ReduceOp OpOf(std::size_t index) const {
    return HasBuffers(index) ? ReduceOp::kSum : agreement_.spec().op;
  }
  bool on_gpu() const { return agreement_.spec().on_gpu; }

  // Constant after construction.
  const LayoutPlan& plan_;
  const LayoutAgreement& agreement_;
  const JobTerms& terms_;
  const Membership& members_;
  LayoutChannel* const layout_;
  const OnReduced reduced_;

  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::uint64_t given_up_ = 0;  // the last step that was given up
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_BUCKET_REDUCTIONS_H_
