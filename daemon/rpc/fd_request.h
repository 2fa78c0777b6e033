// The messages of the side socket, decoded and encoded: proto/gradsync/shared_memory.h.

#ifndef DAEMON_RPC_FD_REQUEST_H_
#define DAEMON_RPC_FD_REQUEST_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {

// Returns the nonce, kNonceBytes bytes, of a client's message. INVALID_ARGUMENT: `message` is no
// FdRequest. FAILED_PRECONDITION: the client has another shared-memory ABI.
absl::StatusOr<std::string> DecodeFdRequest(absl::string_view message);

// The answer that goes with `descriptors` descriptors. The message of a status is cut if it is too
// long.
FdReply EncodeFdReply(const absl::Status& status, std::size_t descriptors);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_FD_REQUEST_H_
