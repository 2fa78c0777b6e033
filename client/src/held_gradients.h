// Gradients that MarkUnused overwrites with zeros, kept until it is known whether any rank used
// them.

#ifndef CLIENT_SRC_HELD_GRADIENTS_H_
#define CLIENT_SRC_HELD_GRADIENTS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/base/call_once.h"

namespace gradsync::client {

// What a gradient in host memory held before it was filled with zeros.
struct HeldGradient {
  std::size_t parameter = 0;
  std::uint64_t offset = 0;  // bytes from the arena's start
  std::vector<std::byte> bytes;
};

// Gradients that no rank used, to be put back when their step is complete. Thread-safe.
class Restoration {
 public:
  Restoration(std::uint64_t step, std::vector<HeldGradient> gradients)
      : step_(step), gradients_(std::move(gradients)) {}

  std::uint64_t step() const { return step_; }
  // Puts the gradients back once, however many threads call this.
  void Restore(std::byte* arena);

 private:
  const std::uint64_t step_;
  absl::once_flag once_;
  std::vector<HeldGradient> gradients_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_HELD_GRADIENTS_H_
