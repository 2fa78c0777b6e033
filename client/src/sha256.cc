// OpenSSL's older functions: EVP would bring all of OpenSSL into the trainer's process, with code
// that runs when the process exits. These are linked statically and need nothing else; they use the
// CPU's SHA instructions too.
#define OPENSSL_SUPPRESS_DEPRECATED
#include "client/src/sha256.h"

#include <openssl/sha.h>

namespace gradsync::client {
namespace {

SHA256_CTX* ContextOf(std::array<std::byte, 128>* bytes) {
  static_assert(sizeof(SHA256_CTX) <= sizeof(*bytes));
  static_assert(alignof(SHA256_CTX) <= 8);
  return reinterpret_cast<SHA256_CTX*>(bytes->data());
}

static_assert(Sha256::kDigestBytes == SHA256_DIGEST_LENGTH);

}  // namespace

Sha256::Sha256() { SHA256_Init(ContextOf(&context_)); }

void Sha256::Add(const void* data, std::size_t bytes) {
  if (bytes > 0) SHA256_Update(ContextOf(&context_), data, bytes);
}

std::string Sha256::Finish() {
  std::string digest(kDigestBytes, '\0');
  SHA256_Final(reinterpret_cast<unsigned char*>(digest.data()), ContextOf(&context_));
  SHA256_Init(ContextOf(&context_));
  return digest;
}

}  // namespace gradsync::client
