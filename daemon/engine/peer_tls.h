// TLS for the connections between the engines of a job's nodes.

#ifndef DAEMON_ENGINE_PEER_TLS_H_
#define DAEMON_ENGINE_PEER_TLS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/engine/peer_tls_keys.h"

struct ssl_ctx_st;

namespace gradsync::daemon {

// TLS 1.3. Both sides show a certificate of the authority. A certificate is not tied to an address:
// the secret of the job's engine, which every connection shows next, is known to its nodes alone.
// Thread-safe.
class PeerTls {
 public:
  // INVALID_ARGUMENT says which part cannot be used.
  static absl::StatusOr<std::shared_ptr<PeerTls>> Make(const PeerTlsKeys& keys);
  ~PeerTls();
  PeerTls(const PeerTls&) = delete;
  PeerTls& operator=(const PeerTls&) = delete;

  ssl_ctx_st* context() const { return context_; }

 private:
  explicit PeerTls(ssl_ctx_st* context) : context_(context) {}
  ssl_ctx_st* const context_;
};

// The earliest expiry of the certificates in a PEM text. InfiniteFuture: it has none.
absl::Time FirstExpiry(const std::string& pem);
// The latest one.
absl::Time LastExpiry(const std::string& pem);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_PEER_TLS_H_
