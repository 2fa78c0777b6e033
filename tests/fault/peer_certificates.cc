#include "tests/fault/peer_certificates.h"

#include <cstdlib>

#include "gtest/gtest.h"

namespace gradsync::fault {

PeerCertificates::PeerCertificates() {
  const std::string command = "deploy/peer-keys " + folder_.File("keys") + " 2 >/dev/null";
  EXPECT_EQ(std::system(command.c_str()), 0);  // NOLINT(cert-env33-c)
}

std::vector<std::string> PeerCertificates::Flags() const {
  return {"--peer_tls_certificate=" + folder_.File("keys/peer.crt"),
          "--peer_tls_key=" + folder_.File("keys/peer.key"),
          "--peer_tls_ca=" + folder_.File("keys/ca.crt"), "--peer_tls_name=gradsyncd"};
}

}  // namespace gradsync::fault
