#include "daemon/peer/peer_credentials.h"

#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/peer_tls.h"

namespace gradsync::daemon {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file.good() || text.str().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' cannot be read, or is empty"));
  }
  return text.str();
}

}  // namespace

absl::StatusOr<PeerCredentials> PeerCredentials::Read(const std::string& certificate_file,
                                                      const std::string& key_file,
                                                      const std::string& ca_file) {
  const int given = !certificate_file.empty() + !key_file.empty() + !ca_file.empty();
  if (given == 0) {
    return PeerCredentials{grpc::InsecureServerCredentials(), grpc::InsecureChannelCredentials(),
                           nullptr};
  }
  if (given != 3) {
    return absl::InvalidArgumentError(
        "peer_tls_certificate, peer_tls_key and peer_tls_ca: give all three or none, since both "
        "sides show a certificate");
  }
  const auto certificate = ReadFile(certificate_file);
  if (!certificate.ok()) return certificate.status();
  const auto key = ReadFile(key_file);
  if (!key.ok()) return key.status();
  const auto ca = ReadFile(ca_file);
  if (!ca.ok()) return ca.status();
  grpc::SslServerCredentialsOptions server(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  server.pem_root_certs = *ca;
  server.pem_key_cert_pairs.push_back({*key, *certificate});
  grpc::SslCredentialsOptions client;
  client.pem_root_certs = *ca;
  client.pem_private_key = *key;
  client.pem_cert_chain = *certificate;
  auto keys = std::make_shared<const PeerTlsKeys>(PeerTlsKeys{*certificate, *key, *ca});
  if (const auto usable = PeerTls::Make(*keys); !usable.ok()) return usable.status();
  return PeerCredentials{grpc::SslServerCredentials(server), grpc::SslCredentials(client),
                         std::move(keys)};
}

}  // namespace gradsync::daemon
