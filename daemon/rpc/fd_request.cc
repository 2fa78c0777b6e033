#include "daemon/rpc/fd_request.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

absl::StatusOr<std::string> DecodeFdRequest(absl::string_view message) {
  FdRequest request;
  if (message.size() == sizeof(request)) std::memcpy(&request, message.data(), sizeof(request));
  if (message.size() != sizeof(request) || request.magic != kFdMagic) {
    return absl::InvalidArgumentError(
        "this is gradsync's side socket, which expects one FdRequest");
  }
  if (request.abi != kSharedMemoryAbi) {
    return absl::FailedPreconditionError(absl::StrCat("shared-memory ABI ", request.abi,
                                                      ", this daemon has ", kSharedMemoryAbi,
                                                      ": upgrade the older of the two"));
  }
  return std::string(reinterpret_cast<const char*>(request.nonce), kNonceBytes);
}

FdReply EncodeFdReply(const absl::Status& status, std::size_t descriptors) {
  FdReply reply;
  reply.status = static_cast<std::uint32_t>(status.code());
  reply.fd_count = static_cast<std::uint32_t>(descriptors);
  const std::size_t length = std::min(status.message().size(), sizeof(reply.message) - 1);
  if (length > 0) std::memcpy(reply.message, status.message().data(), length);
  return reply;
}

}  // namespace gradsync::daemon
