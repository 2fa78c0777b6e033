// Calls whose headers are too long.

#ifndef DAEMON_RPC_LONG_HEADERS_H_
#define DAEMON_RPC_LONG_HEADERS_H_

#include <grpcpp/server_context.h>

#include <cstddef>

namespace gradsync::daemon {

// The most bytes of a call's headers. Each header counts 32 bytes besides its text, as in HTTP/2.
// The text of an honest call has a few hundred bytes. HeaderFrames limits headers on the wire,
// where one may take a single byte.
inline constexpr std::size_t kMaxHeaderBytes = 16 << 10;
inline constexpr std::size_t kBytesOfAnEntry = 32;

// True if the headers that gRPC shows have more than kMaxHeaderBytes. It keeps some to itself. gRPC
// keeps headers in memory for as long as the call lives, and no user pays for them.
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
