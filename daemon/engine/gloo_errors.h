// Turns Gloo's exceptions into statuses. Nothing else does.

#ifndef DAEMON_ENGINE_GLOO_ERRORS_H_
#define DAEMON_ENGINE_GLOO_ERRORS_H_

#include <exception>

#include "absl/status/status.h"

namespace gradsync::daemon {

// UNAVAILABLE for gloo::IoException (a connection broke, could not be made, or timed out), INTERNAL
// for all others. The message is Gloo's, without the source line.
absl::Status StatusOfGloo(const std::exception& error);

// Runs `call`, which calls Gloo.
template <typename Call>
absl::Status GuardGloo(const Call& call) {
  try {
    call();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return StatusOfGloo(error);
  }
}

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_GLOO_ERRORS_H_
