// The errors of a layout's steps.

#ifndef CLIENT_SRC_STEP_ERRORS_H_
#define CLIENT_SRC_STEP_ERRORS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/src/error.h"

namespace gradsync::client {

// Names the layout and the rank in every error. Constant, so thread-safe. `call` is the name of the
// trainer's call.
class StepErrors {
 public:
  // `fields`: of the session, and the layout's channel.
  StepErrors(const ErrorFields& fields, std::string layout, std::size_t buckets,
             std::size_t parameters);

  // "layout 'default', rank 1, step 3, bucket 2: `what`". `bucket`: nullopt if none is meant.
  absl::Status Make(absl::StatusCode code, Reason reason, std::uint64_t step,
                    std::optional<std::size_t> bucket, absl::string_view what) const;
  // The same with the code, reason and message of `status`; OK stays OK.
  absl::Status With(const absl::Status& status, std::uint64_t step,
                    std::optional<std::size_t> bucket) const;

  // INVALID_ARGUMENT.
  absl::Status UnknownBucketError(std::uint64_t step, std::size_t bucket) const;
  absl::Status UnknownParameterError(std::uint64_t step, std::size_t parameter) const;
  absl::Status WrongUsedSizeError(std::uint64_t step, absl::string_view call,
                                  std::size_t size) const;
  // The layout is on a GPU (NeedsStreams) or in host memory (NeedsNoStream), and needs the other
  // form of `call`.
  absl::Status NeedsStreamsError(std::uint64_t step, absl::string_view call) const;
  absl::Status NeedsNoStreamError(std::uint64_t step, absl::string_view call) const;

  // FAILED_PRECONDITION: `call` is not allowed after what this rank said before.
  absl::Status OutOfOrderError(std::uint64_t step, absl::string_view call,
                               absl::string_view why) const;
  absl::Status StaleStepError(std::uint64_t step, std::uint64_t next_step) const;
  absl::Status FutureStepError(std::uint64_t step, std::uint64_t next_step,
                               absl::string_view call) const;

  // ABORTED: for a void step when the daemon does not say why.
  absl::Status VoidStepError(std::uint64_t step, std::optional<std::size_t> bucket) const;

 private:
  const ErrorFields fields_;
  const std::string layout_;
  const std::size_t buckets_;
  const std::size_t parameters_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STEP_ERRORS_H_
