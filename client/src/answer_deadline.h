// How long a call waits for the daemon's answer.

#ifndef CLIENT_SRC_ANSWER_DEADLINE_H_
#define CLIENT_SRC_ANSWER_DEADLINE_H_

#include <algorithm>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace gradsync::client {

// Normally the daemon itself reports that a call's time-out has passed. If it has not done so after
// this much more time, the call stops waiting.
inline constexpr absl::Duration kAnswerPatience = absl::Seconds(2);

// The deadline for the answer to a call with this time-out.
inline absl::Time AnswerDeadline(absl::Duration timeout) {
  return absl::Now() + std::max(timeout, absl::ZeroDuration()) + kAnswerPatience;
}

// When the call's time-out passes. `answer_deadline`: the call's AnswerDeadline().
inline absl::Time TimeoutEnd(absl::Time answer_deadline) {
  return answer_deadline - kAnswerPatience;
}

// How long to wait until the stream tells why the side socket gave no descriptors. A nonce becomes
// invalid when its session or agreement ends, and the stream may tell of that end later.
inline absl::Duration PatienceForReason(const absl::Status& no_descriptors) {
  const bool nonce_ended = absl::IsNotFound(no_descriptors) || absl::IsUnavailable(no_descriptors);
  return nonce_ended ? absl::Seconds(5) : absl::ZeroDuration();
}

}  // namespace gradsync::client

#endif  // CLIENT_SRC_ANSWER_DEADLINE_H_
