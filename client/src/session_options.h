// Checks SessionOptions and writes them to OpenSession.

#ifndef CLIENT_SRC_SESSION_OPTIONS_H_
#define CLIENT_SRC_SESSION_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"

namespace gradsync::v1 {
class OpenSession;
}

namespace gradsync::client {

// INVALID_ARGUMENT MALFORMED: names the option.
absl::Status ValidateOptions(const SessionOptions& options);

// `options` must be valid.
void FillOpenSession(const SessionOptions& options, v1::OpenSession* open);

// A timeout as messages have it: milliseconds, rounded up, at least 1. An infinite one becomes ten
// years.
std::uint64_t TimeoutMs(absl::Duration timeout);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_SESSION_OPTIONS_H_
