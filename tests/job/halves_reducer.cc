#include "tests/job/halves_reducer.h"

#include <cstdint>

namespace gradsync::daemon {

Half HalvesReducer::Combined(const ReduceOperation& operation, int half) {
  double sum = 0;
  std::array<std::uint8_t, sizeof(Half)> bytes{};
  for (const std::byte* buffer : operation.host().buffers) {
    const Half term = reinterpret_cast<const Half*>(buffer)[half];
    sum += ValueOf(term);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::uint8_t>(bytes[i] + (term >> (8 * i)));
    }
  }
  if (operation.dtype != DataType::kUint8) return HalfOf(sum * operation.scale);
  Half combined = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) combined |= Half{bytes[i]} << (8 * i);
  return combined;
}

void HalvesReducer::Move(std::size_t index) {
  Held& held = held_[index];
  ReduceOperation* const operation = held.operation;
  const int half = held.moves % kHalves;
  Half& result = held.results[static_cast<std::size_t>(half)];
  if (held.moves < kHalves) {
    result = Combined(*operation, half);
  } else {
    for (std::byte* buffer : operation->host().buffers) {
      reinterpret_cast<Half*>(buffer)[half] = result;
    }
  }
  if (++held.moves < kMoves) return;
  if (operation->measure) {
    operation->stats = {};
    for (const Half value : held.results) {
      operation->stats.sum_of_squares += ValueOf(value) * ValueOf(value);
    }
  }
  held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
  operation->done({clock_->NowNs(), clock_->NowNs()});
}

}  // namespace gradsync::daemon
