// Calls whose headers are too long.

#ifndef DAEMON_RPC_LONG_HEADERS_H_
#define DAEMON_RPC_LONG_HEADERS_H_

#include <grpcpp/server_context.h>

#include <cstddef>

namespace gradsync::daemon {

// An honest call has a few hundred bytes of headers. gRPC's own limit, 8 KiB, holds only for a
// client that acknowledges it, and only for the headers of one frame.
inline constexpr std::size_t kMaxHeaderBytes = 16 << 10;

// True if the call has more. gRPC keeps them for as long as the call lives, and no user pays for
// them.
inline bool HasLongHeaders(const grpc::ServerContextBase& context) {
  std::size_t bytes = 0;
  for (const auto& [name, value] : context.client_metadata()) {
    bytes += name.size() + value.size();
    if (bytes > kMaxHeaderBytes) return true;
  }
  return false;
}

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_LONG_HEADERS_H_
