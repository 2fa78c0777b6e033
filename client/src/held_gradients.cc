#include "client/src/held_gradients.h"

#include <cstring>

namespace gradsync::client {

void Restoration::Restore(std::byte* arena) {
  absl::call_once(once_, [&] {
    for (const HeldGradient& gradient : gradients_) {
      std::memcpy(arena + gradient.offset, gradient.bytes.data(), gradient.bytes.size());
    }
    gradients_.clear();
  });
}

}  // namespace gradsync::client
