// What a node that connects to the others stores for them in the rendezvous: where it listens, the
// secret that they must show there, and its settings.

#ifndef DAEMON_ENGINE_STORED_PEER_H_
#define DAEMON_ENGINE_STORED_PEER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/engine/local_address.h"

namespace gradsync::daemon {

// The length of the secret, in bytes.
inline constexpr std::size_t kPeerTokenBytes = 32;

struct StoredPeer {
  SocketAddress address;
  std::string token;      // kPeerTokenBytes bytes
  std::string agreement;  // the settings, as a line of text
};

// "ADDRESS PORT TOKEN", the token in hexadecimal digits, a newline, and the agreement. `address` is
// numeric.
std::string EncodeStoredPeer(absl::string_view address, std::uint16_t port, absl::string_view token,
                             absl::string_view agreement);

// INVALID_ARGUMENT: `value` does not have the form that EncodeStoredPeer() writes. The agreement
// may be any text.
absl::StatusOr<StoredPeer> DecodeStoredPeer(absl::string_view value);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_STORED_PEER_H_
