// A certificate authority and a certificate, made for one test.

#ifndef TESTS_ENGINE_TEST_CERTIFICATES_H_
#define TESTS_ENGINE_TEST_CERTIFICATES_H_

#include "absl/time/time.h"
#include "daemon/engine/peer_tls_keys.h"

namespace gradsync::daemon {

class TestCertificates {
 public:
  // They expire after `valid`.
  explicit TestCertificates(absl::Duration valid = absl::Hours(24));
  const PeerTlsKeys& keys() const { return keys_; }

 private:
  PeerTlsKeys keys_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_TEST_CERTIFICATES_H_
