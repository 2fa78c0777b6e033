// Calls whose headers are too long.

#ifndef DAEMON_RPC_LONG_HEADERS_H_
#define DAEMON_RPC_LONG_HEADERS_H_

#include <grpcpp/server_context.h>

#include <cstddef>

namespace gradsync::daemon {

// An honest call has a few hundred bytes of headers, and 32 for each of them, as HTTP/2 counts.
// HeaderFrames limits them on the wire, where one may have a single byte.
inline constexpr std::size_t kMaxHeaderBytes = 16 << 10;
inline constexpr std::size_t kBytesOfAnEntry = 32;

// True if the call has more of those that gRPC shows; it keeps some to itself. gRPC keeps headers
// in memory for as long as the call lives, and no user pays for them.
inline bool HasLongHeaders(const grpc::ServerContextBase& context) {
  std::size_t bytes = 0;
  for (const auto& [name, value] : context.client_metadata()) {
    bytes += name.size() + value.size() + kBytesOfAnEntry;
    if (bytes > kMaxHeaderBytes) return true;
  }
  return false;
}

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_LONG_HEADERS_H_
