#include "tests/engine/test_certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>

namespace gradsync::daemon {
namespace {

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;

Key NewKey() { return Key(EVP_EC_gen("prime256v1"), &EVP_PKEY_free); }

Certificate Sign(const char* name, absl::Duration valid, EVP_PKEY* key, X509* authority,
                 EVP_PKEY* authority_key) {
  Certificate certificate(X509_new(), &X509_free);
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), authority == nullptr ? 1 : 2);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), absl::ToInt64Seconds(valid));
  X509_NAME* const subject = X509_get_subject_name(certificate.get());
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name), -1, -1, 0);
  X509_set_issuer_name(certificate.get(),
                       authority == nullptr ? subject : X509_get_subject_name(authority));
  X509_set_pubkey(certificate.get(), key);
  if (authority == nullptr) {
    X509_EXTENSION* const is_authority =
        X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints, "critical,CA:TRUE");
    X509_add_ext(certificate.get(), is_authority, -1);
    X509_EXTENSION_free(is_authority);
  }
  X509_sign(certificate.get(), authority_key, EVP_sha256());
  return certificate;
}

std::string TextOf(BIO* bio) {
  char* data = nullptr;
  const auto size = BIO_get_mem_data(bio, &data);
  return {data, static_cast<std::size_t>(size)};
}

std::string Pem(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()), &BIO_free);
  PEM_write_bio_X509(bio.get(), certificate);
  return TextOf(bio.get());
}

std::string Pem(EVP_PKEY* key) {
  const Bio bio(BIO_new(BIO_s_mem()), &BIO_free);
  PEM_write_bio_PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr);
  return TextOf(bio.get());
}

}  // namespace

TestCertificates::TestCertificates(absl::Duration valid) {
  const Key authority_key = NewKey(), key = NewKey();
  const Certificate authority =
      Sign("authority", valid, authority_key.get(), nullptr, authority_key.get());
  const Certificate own = Sign("gradsyncd", valid, key.get(), authority.get(), authority_key.get());
  keys_ = {Pem(own.get()), Pem(key.get()), Pem(authority.get())};
}

}  // namespace gradsync::daemon
