// The TLS credentials for connections between daemons.

#ifndef DAEMON_PEER_PEER_CREDENTIALS_H_
#define DAEMON_PEER_PEER_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/engine/peer_tls_keys.h"

namespace gradsync::daemon {

struct PeerCredentials {
  std::shared_ptr<grpc::ServerCredentials> server;
  std::shared_ptr<grpc::ChannelCredentials> client;

  // The same, for the engines of jobs. Null: no TLS.
  std::shared_ptr<const PeerTlsKeys> keys;

  // Reads three PEM files; both sides of a connection must then show a certificate. If all names
  // are empty, there is no TLS. INVALID_ARGUMENT: some are empty, or a file cannot be read or used.
  static absl::StatusOr<PeerCredentials> Read(const std::string& certificate_file,
                                              const std::string& key_file,
                                              const std::string& ca_file);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_CREDENTIALS_H_
