#include "client/src/step_errors.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/include/gradsync/client.h"

namespace gradsync::client {

StepErrors::StepErrors(const ErrorFields& fields, std::string layout, std::size_t buckets,
                       std::size_t parameters)
    : fields_(fields), layout_(std::move(layout)), buckets_(buckets), parameters_(parameters) {}

absl::Status StepErrors::Make(absl::StatusCode code, Reason reason, std::uint64_t step,
                              std::optional<std::size_t> bucket, absl::string_view what) const {
  ErrorFields fields = fields_;
  fields.step = step;
  fields.bucket = bucket;
  return MakeError(
      code, reason,
      absl::StrCat("layout '", layout_, "', rank ", fields.rank.value_or(0), ", step ", step,
                   bucket.has_value() ? absl::StrCat(", bucket ", *bucket) : "", ": ", what),
      fields);
}

absl::Status StepErrors::With(const absl::Status& status, std::uint64_t step,
                              std::optional<std::size_t> bucket) const {
  if (status.ok()) return status;
  return Make(status.code(), Reason(ErrorReason(status)), step, bucket, status.message());
}

absl::Status StepErrors::UnknownBucketError(std::uint64_t step, std::size_t bucket) const {
  return Make(absl::StatusCode::kInvalidArgument, reason::kUnknownBucket, step, bucket,
              absl::StrCat("there is no such bucket; the layout has ", buckets_));
}

absl::Status StepErrors::UnknownParameterError(std::uint64_t step, std::size_t parameter) const {
  return Make(absl::StatusCode::kInvalidArgument, reason::kUnknownParameter, step, std::nullopt,
              absl::StrCat("there is no parameter ", parameter, "; the layout has ", parameters_));
}

absl::Status StepErrors::WrongUsedSizeError(std::uint64_t step, absl::string_view call,
                                            std::size_t size) const {
  return Make(
      absl::StatusCode::kInvalidArgument, reason::kMalformed, step, std::nullopt,
      absl::StrCat(call, " has flags for ", size, " parameters; the layout has ", parameters_));
}

absl::Status StepErrors::NeedsStreamsError(std::uint64_t step, absl::string_view call) const {
  return Make(absl::StatusCode::kInvalidArgument, reason::kMalformed, step, std::nullopt,
              absl::StrCat(call,
                           " without streams, but the layout is on a GPU; say on which "
                           "streams its gradients are written"));
}

absl::Status StepErrors::NeedsNoStreamError(std::uint64_t step, absl::string_view call) const {
  return Make(absl::StatusCode::kInvalidArgument, reason::kMalformed, step, std::nullopt,
              absl::StrCat(call,
                           " with a stream, but the layout is in host memory; register it "
                           "with a device"));
}

absl::Status StepErrors::OutOfOrderError(std::uint64_t step, absl::string_view call,
                                         absl::string_view why) const {
  return Make(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, step, std::nullopt,
              absl::StrCat(call, " ", why));
}

absl::Status StepErrors::StaleStepError(std::uint64_t step, std::uint64_t next_step) const {
  return Make(absl::StatusCode::kFailedPrecondition, reason::kStaleStep, step, std::nullopt,
              absl::StrCat("it is already decided; the next step is ", next_step));
}

absl::Status StepErrors::FutureStepError(std::uint64_t step, std::uint64_t next_step,
                                         absl::string_view call) const {
  return OutOfOrderError(step, call,
                         absl::StrCat("of a later step than the one to run now, ", next_step));
}

absl::Status StepErrors::VoidStepError(std::uint64_t step,
                                       std::optional<std::size_t> bucket) const {
  return Make(absl::StatusCode::kAborted, reason::kStepVoid, step, bucket,
              "the step is void, and the daemon did not say why");
}

}  // namespace gradsync::client
