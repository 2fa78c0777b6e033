// The job and the layout of the random schedules with policy `hold`.

#ifndef TESTS_JOB_MODEL_REQUEST_H_
#define TESTS_JOB_MODEL_REQUEST_H_

#include <cstdint>
#include <string>

#include "daemon/job/job_options.h"
#include "daemon/job/layout_agreement.h"
#include "tests/job/model_state.h"

namespace gradsync::daemon {

inline constexpr std::uint64_t kModelForever = ~std::uint64_t{0};

inline JobOptions ModelJobOptions(StateSource source) {
  JobOptions options;
  options.step_timeout_ns = options.hold_timeout_ns = kModelForever / 4;
  options.on_rank_loss = OnRankLoss::kHold;
  options.state_source = source;
  return options;
}

// Two buckets of kHalves gradients, and perhaps one for the buffers of the model.
inline LayoutRequest ModelLayout(bool buffers) {
  LayoutRequest request;
  request.spec.name = "model";
  request.spec.bucket_cap_bytes = request.spec.first_bucket_cap_bytes = 1;
  for (const char* name : {"p0", "p1"}) {
    request.spec.parameters.push_back({name, {kHalves}, DataType::kFloat64});
  }
  if (buffers) request.spec.buffer_bytes = kHalves * sizeof(Half);
  request.deadline_ns = kModelForever;
  return request;
}

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_MODEL_REQUEST_H_
