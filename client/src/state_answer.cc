#include "client/src/state_answer.h"

#include <algorithm>

#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {

void StateAnswer::HashPiece(const StateImageSource& image) {
  for (std::size_t left = kPieceBytes; left > 0 && !hashed(image);) {
    const StateItem& item = image.items()[digests_.size()];
    const std::size_t piece = std::min<std::uint64_t>(left, item.bytes - hashed_bytes_);
    if (piece > 0) hash_.Add(static_cast<const std::byte*>(item.data) + hashed_bytes_, piece);
    hashed_bytes_ += piece;
    left -= piece;
    if (hashed_bytes_ < item.bytes) break;
    digests_.push_back(hash_.Finish());
    hashed_bytes_ = 0;
  }
}

void StateAnswer::FillDigests(const StateImageSource& image, v1::StateDigests* out) const {
  for (std::size_t i = 0; i < digests_.size(); ++i) {
    v1::StateDigest& digest = *out->add_items();
    digest.set_name(image.items()[i].name);
    digest.set_sha256(digests_[i]);
  }
}

bool StateAnswer::CopyPiece(const StateImageSource& image, std::size_t bytes, std::byte* out) {
  const std::size_t piece = std::min(kPieceBytes, bytes - chunk_bytes_);
  image.Copy(copied_ + chunk_bytes_, piece, out + chunk_bytes_);
  chunk_bytes_ += piece;
  if (chunk_bytes_ < bytes) return false;
  copied_ += bytes;
  ++next_chunk_;
  chunk_bytes_ = 0;
  return true;
}

}  // namespace gradsync::client
