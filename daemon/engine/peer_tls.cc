#include "daemon/engine/peer_tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <ctime>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

// How much of a connection's data is read at a time: several records of TLS, which has at most 16
// KiB in each.
constexpr std::size_t kReadBytes = 64 << 10;

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

Bio BioOf(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &BIO_free);
}

Certificate NextCertificate(BIO* from) {
  return Certificate(PEM_read_bio_X509(from, nullptr, nullptr, nullptr), &X509_free);
}

absl::Status Unusable(const char* what) {
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(what, " cannot be used for TLS"));
}

absl::Status UseCertificates(SSL_CTX* context, const std::string& text) {
  const Bio from = BioOf(text);
  const Certificate own = NextCertificate(from.get());
  if (own == nullptr || SSL_CTX_use_certificate(context, own.get()) != 1) {
    return Unusable("peer_tls_certificate");
  }
  while (const Certificate next = NextCertificate(from.get())) {
    if (SSL_CTX_add1_chain_cert(context, next.get()) != 1) return Unusable("peer_tls_certificate");
  }
  ERR_clear_error();  // "no start line": the end of the text
  return absl::OkStatus();
}

absl::Status UseKey(SSL_CTX* context, const std::string& text) {
  const Bio from = BioOf(text);
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_bio_PrivateKey(from.get(), nullptr, nullptr, nullptr), &EVP_PKEY_free);
  if (key == nullptr) return Unusable("peer_tls_key");
  if (X509_check_private_key(SSL_CTX_get0_certificate(context), key.get()) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError("peer_tls_key is not the key of peer_tls_certificate");
  }
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1) return Unusable("peer_tls_key");
  return absl::OkStatus();
}

absl::Status UseAuthorities(SSL_CTX* context, const std::string& text) {
  const Bio from = BioOf(text);
  int found = 0;
  while (const Certificate next = NextCertificate(from.get())) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), next.get()) != 1) {
      return Unusable("peer_tls_ca");
    }
    ++found;
  }
  if (found == 0) return Unusable("peer_tls_ca");
  ERR_clear_error();
  return absl::OkStatus();
}

// When each certificate of a PEM text expires.
std::vector<absl::Time> Expiries(const std::string& pem) {
  const Bio from = BioOf(pem);
  std::vector<absl::Time> expiries;
  while (const Certificate next = NextCertificate(from.get())) {
    std::tm end{};
    if (ASN1_TIME_to_tm(X509_get0_notAfter(next.get()), &end) != 1) continue;
    expiries.push_back(absl::FromTM(end, absl::UTCTimeZone()));
  }
  ERR_clear_error();
  return expiries;
}

}  // namespace

absl::StatusOr<std::shared_ptr<PeerTls>> PeerTls::Make(const PeerTlsKeys& keys) {
  std::shared_ptr<PeerTls> tls(new PeerTls(SSL_CTX_new(TLS_method())));
  SSL_CTX* const context = tls->context();
  if (context == nullptr || SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1) {
    return Unusable("this machine's OpenSSL");
  }
  absl::Status status = UseCertificates(context, keys.certificate);
  if (status.ok()) status = UseKey(context, keys.key);
  if (status.ok()) status = UseAuthorities(context, keys.ca);
  if (!status.ok()) return status;
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  // Every connection is made once. And a ticket that nobody reads would reset a connection that
  // ends.
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  // The lengths of all messages are known, so an end can cut nothing unseen.
  SSL_CTX_set_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, kReadBytes);
  return tls;
}

absl::Time FirstExpiry(const std::string& pem) {
  const std::vector<absl::Time> expiries = Expiries(pem);
  const auto first = std::min_element(expiries.begin(), expiries.end());
  return first == expiries.end() ? absl::InfiniteFuture() : *first;
}

absl::Time LastExpiry(const std::string& pem) {
  const std::vector<absl::Time> expiries = Expiries(pem);
  const auto last = std::max_element(expiries.begin(), expiries.end());
  return last == expiries.end() ? absl::InfiniteFuture() : *last;
}

PeerTls::~PeerTls() { SSL_CTX_free(context_); }

}  // namespace gradsync::daemon
