// Errors of the client: absl::Status with a google.rpc.ErrorInfo payload, as the daemon sends them.

#ifndef CLIENT_SRC_ERROR_H_
#define CLIENT_SRC_ERROR_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gradsync/error_reason.h"

namespace google::rpc {
class Status;
}

namespace gradsync::client {

// What an error is about. A field is set only if it applies.
struct ErrorFields {
  std::string job;
  std::optional<std::uint32_t> rank;
  std::optional<std::uint32_t> channel;
  std::optional<std::uint64_t> step;
  std::optional<std::uint64_t> bucket;
};

absl::Status MakeError(absl::StatusCode code, Reason reason, absl::string_view message,
                       const ErrorFields& fields = {});

// The status in a message (StepDone, OperationFailed, SessionEnding). A code that absl does not
// have becomes UNKNOWN.
absl::Status StatusFromProto(const google::rpc::Status& proto);

// The status of a stream's end. `details`: the trailer grpc-status-details-bin, which is a
// serialized google.rpc.Status, or empty.
absl::Status StatusFromTrailer(int code, absl::string_view message, absl::string_view details);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_ERROR_H_
