// How long a call waits for what the daemon says.

#ifndef CLIENT_SRC_ANSWER_DEADLINE_H_
#define CLIENT_SRC_ANSWER_DEADLINE_H_

#include <algorithm>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace gradsync::client {

// The deadline for an answer about a call with this time-out. The daemon itself reports a time-out.
// If it says nothing for 2 s more, it does not answer at all.
inline absl::Time AnswerDeadline(absl::Duration timeout) {
  return absl::Now() + std::max(timeout, absl::ZeroDuration()) + absl::Seconds(2);
}

// How long to wait on the stream for the reason why the side socket has given no descriptors. A
// nonce ends with its session or its agreement, and that end may arrive later on the stream.
inline absl::Duration PatienceForReason(const absl::Status& no_descriptors) {
  const bool nonce_ended = absl::IsNotFound(no_descriptors) || absl::IsUnavailable(no_descriptors);
  return nonce_ended ? absl::Seconds(5) : absl::ZeroDuration();
}

}  // namespace gradsync::client

#endif  // CLIENT_SRC_ANSWER_DEADLINE_H_
