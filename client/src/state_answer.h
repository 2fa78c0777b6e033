// What a rank has done to answer one StateQuestion.

#ifndef CLIENT_SRC_STATE_ANSWER_H_
#define CLIENT_SRC_STATE_ANSWER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/src/sha256.h"
#include "client/src/state_image.h"

namespace gradsync::v1 {
class StateDigests;
}

namespace gradsync::client {

// Hashes and copies a StateImageSource piece by piece, so that a reader can stop between two pieces
// and go on later with an image of the same shape. Thread-compatible. Waits for nothing.
class StateAnswer {
 public:
  // The bytes between two checks for a cancel: less than 5 ms of hashing.
  static constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

  // ---- Digests

  bool hashed(const StateImageSource& image) const {
    return digests_.size() == image.items().size();
  }
  // Hashes at most kPieceBytes more. Requires !hashed().
  void HashPiece(const StateImageSource& image);
  // In the order of the items. Requires hashed().
  void FillDigests(const StateImageSource& image, v1::StateDigests* out) const;

  // ---- Chunks

  // How many bytes of the image are copied, in whole chunks.
  std::uint64_t copied() const { return copied_; }
  // The number of the next chunk, from 0.
  std::uint64_t next_chunk() const { return next_chunk_; }
  // Copies at most kPieceBytes more of the next chunk, which has `bytes` bytes, to its place in
  // `out`. True: the chunk is complete. Requires that copied() + `bytes` is at most the image's
  // size.
  bool CopyPiece(const StateImageSource& image, std::size_t bytes, std::byte* out);

 private:
  Sha256 hash_;
  std::uint64_t hashed_bytes_ = 0;  // of the first item without digest
  std::vector<std::string> digests_;
  std::uint64_t copied_ = 0;
  std::uint64_t next_chunk_ = 0;
  std::size_t chunk_bytes_ = 0;  // copied of the next chunk
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STATE_ANSWER_H_
