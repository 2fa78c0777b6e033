// The form in which the state of the model travels between two clients. To the daemon it is only
// bytes.
//
//   magic            8 bytes, "GSSTATE1"
//   items            8 bytes, little-endian, as all numbers
//   per item         8 bytes: length of the name; 8 bytes: length of the value; the name
//   zeros            up to a multiple of 64
//   per item         the value, and zeros up to a multiple of 64

#ifndef CLIENT_SRC_STATE_IMAGE_H_
#define CLIENT_SRC_STATE_IMAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/include/gradsync/client.h"

namespace gradsync::client {

// INVALID_ARGUMENT MALFORMED: names the item whose name is empty, too long, not UTF-8 or not
// unique, or whose memory is null.
absl::Status ValidateItems(absl::Span<const StateItem> items);

// The image of items in a trainer's memory, which is never copied as a whole. Constant, so
// thread-safe. The items' memory belongs to the trainer.
class StateImageSource {
 public:
  // `items` are valid.
  explicit StateImageSource(std::vector<StateItem> items);

  const std::vector<StateItem>& items() const { return items_; }
  std::uint64_t bytes() const { return bytes_; }
  // True if both images have the same items of the same sizes.
  bool SameShape(const StateImageSource& other) const { return header_ == other.header_; }

  // Copies a piece of the image to `out`. `offset` + `bytes` is at most bytes().
  void Copy(std::uint64_t offset, std::size_t bytes, std::byte* out) const;

 private:
  std::vector<StateItem> items_;
  std::string header_;                  // with its padding
  std::vector<std::uint64_t> offsets_;  // of the values; ascending
  std::uint64_t bytes_ = 0;
};

// Memory for an image of another rank, aligned to the size of a page. Null if there is none.
std::shared_ptr<std::byte> NewImageMemory(std::uint64_t bytes);

// The items of an image. Trusts nothing.
//   FAILED_PRECONDITION STATE_REFUSED: says what is malformed.
absl::StatusOr<StateImage> ParseImage(std::uint32_t source, std::shared_ptr<std::byte> memory,
                                      std::uint64_t bytes);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STATE_IMAGE_H_
