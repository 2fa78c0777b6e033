// The key and the certificates that a node uses on TLS connections to other nodes.

#ifndef DAEMON_ENGINE_PEER_TLS_KEYS_H_
#define DAEMON_ENGINE_PEER_TLS_KEYS_H_

#include <string>

namespace gradsync::daemon {

// The contents of PEM files.
struct PeerTlsKeys {
  std::string certificate;  // of this node, then of the authorities up to `ca`
  std::string key;
  std::string ca;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_PEER_TLS_KEYS_H_
