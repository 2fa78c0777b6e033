// Errors of the client: absl::Status with a google.rpc.ErrorInfo payload, the same that the daemon
// sends.

#ifndef CLIENT_SRC_ERROR_H_
#define CLIENT_SRC_ERROR_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace google::rpc {
class Status;
}

namespace gradsync::client {

// Reasons that the client itself gives or heeds; the daemon's are listed in
// proto/gradsync/v1/gradsync.proto.
inline constexpr absl::string_view kAlreadyReady = "ALREADY_READY";
inline constexpr absl::string_view kBadStream = "BAD_STREAM";
inline constexpr absl::string_view kCapturing = "CAPTURING";
inline constexpr absl::string_view kClosed = "CLOSED";
inline constexpr absl::string_view kCredentials = "CREDENTIALS";
inline constexpr absl::string_view kCudaDriverMissing = "CUDA_DRIVER_MISSING";
inline constexpr absl::string_view kCudaDriverTooOld = "CUDA_DRIVER_TOO_OLD";
inline constexpr absl::string_view kCudaError = "CUDA_ERROR";
inline constexpr absl::string_view kCudaUnavailable = "CUDA_UNAVAILABLE";
inline constexpr absl::string_view kDaemonLost = "DAEMON_LOST";
inline constexpr absl::string_view kDaemonSilent = "DAEMON_SILENT";
inline constexpr absl::string_view kDraining = "DRAINING";
inline constexpr absl::string_view kForked = "FORKED";
inline constexpr absl::string_view kGpuFault = "GPU_FAULT";
inline constexpr absl::string_view kGpuNotVisible = "GPU_NOT_VISIBLE";
inline constexpr absl::string_view kGpuOutOfMemory = "GPU_OUT_OF_MEMORY";
inline constexpr absl::string_view kGpuUnsupported = "GPU_UNSUPPORTED";
inline constexpr absl::string_view kGpuUnusable = "GPU_UNUSABLE";
inline constexpr absl::string_view kLayoutReplaced = "LAYOUT_REPLACED";
inline constexpr absl::string_view kLeft = "LEFT";
inline constexpr absl::string_view kMalformed = "MALFORMED";
inline constexpr absl::string_view kMemory = "MEMORY";
inline constexpr absl::string_view kMpsFull = "MPS_FULL";
inline constexpr absl::string_view kProtocolViolation = "PROTOCOL_VIOLATION";
inline constexpr absl::string_view kStaleStep = "STALE_STEP";
inline constexpr absl::string_view kStepInDoubt = "STEP_IN_DOUBT";
inline constexpr absl::string_view kStepVoid = "STEP_VOID";
inline constexpr absl::string_view kUnknownBucket = "UNKNOWN_BUCKET";
inline constexpr absl::string_view kUnknownParameter = "UNKNOWN_PARAMETER";
inline constexpr absl::string_view kWaitTimeout = "WAIT_TIMEOUT";

// What an error is about; each as far as it applies.
struct ErrorFields {
  std::string job;
  std::optional<std::uint32_t> rank;
  std::optional<std::uint32_t> channel;
  std::optional<std::uint64_t> step;
  std::optional<std::uint64_t> bucket;
};

absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       const ErrorFields& fields = {});

// Of a message (StepDone, OperationFailed, SessionEnding). A code outside absl's is UNKNOWN.
absl::Status StatusFromProto(const google::rpc::Status& proto);

// Of a stream's end: `details` is what came in the trailer grpc-status-details-bin, a serialized
// google.rpc.Status, or empty.
absl::Status StatusFromTrailer(int code, absl::string_view message, absl::string_view details);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_ERROR_H_
