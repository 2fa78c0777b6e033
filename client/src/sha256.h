// SHA-256.

#ifndef CLIENT_SRC_SHA256_H_
#define CLIENT_SRC_SHA256_H_

#include <array>
#include <cstddef>
#include <string>

namespace gradsync::client {

// A hash of bytes that come piece by piece. Thread-compatible. Legal call order:
//
//   (Add* Finish)*
class Sha256 {
 public:
  static constexpr std::size_t kDigestBytes = 32;

  Sha256();

  void Add(const void* data, std::size_t bytes);
  // The digest, 32 bytes. Afterwards the object can hash again from the start.
  std::string Finish();

 private:
  // Holds OpenSSL's SHA256_CTX, so that this header does not include OpenSSL's.
  alignas(8) std::array<std::byte, 128> context_{};
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_SHA256_H_
