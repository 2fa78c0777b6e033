#include "tests/job/model_state.h"

#include <cstring>

namespace gradsync::daemon {
namespace {

// A term is a code from 1 to kBase - 1, times kBase to the power of its rank.
constexpr std::uint64_t kBase = 1000;

std::uint64_t Mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9E3779B97F4A7C15ull + b + 0x7F4A7C15ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  return x ^ (x >> 32);
}

}  // namespace

Half HalfOf(double value) {
  Half half;
  std::memcpy(&half, &value, sizeof half);
  return half;
}

double ValueOf(Half half) {
  double value;
  std::memcpy(&value, &half, sizeof value);
  return value;
}

std::uint64_t ModelState::Hash() const {
  return Mix(Mix(parameters[0], parameters[1]), parameters[2]);
}

ModelState ModelState::After(const std::vector<std::array<Half, kHalves>>& averages) const {
  ModelState next = *this;
  for (const auto& bucket : averages) {
    for (const Half half : bucket) {
      for (std::uint64_t& word : next.parameters) word = Mix(word, half);
    }
  }
  ++next.batch;
  if (next.batch == kEpochBatches) next = {next.parameters, next.epoch + 1, 0};
  return next;
}

Half Gradient(std::uint32_t rank, const ModelState& state, DataType dtype, std::size_t bucket,
              int half) {
  std::uint64_t code = Mix(Mix(Mix(state.Hash(), state.epoch), state.batch), rank);
  code = Mix(code, bucket * kHalves + static_cast<std::uint64_t>(half));
  if (dtype == DataType::kUint8) return rank == 0 ? code : 0;
  double term = static_cast<double>(1 + code % (kBase - 1));
  for (std::uint32_t i = 0; i < rank; ++i) term *= kBase;
  return HalfOf(term);
}

Half Average(std::uint32_t ranks, const ModelState& state, DataType dtype, std::size_t bucket,
             int half) {
  if (dtype == DataType::kUint8) return Gradient(0, state, dtype, bucket, half);
  double sum = 0;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    sum += ValueOf(Gradient(rank, state, dtype, bucket, half));
  }
  return HalfOf(sum * (1.0 / ranks));
}

std::vector<ModelState> StatesOfRun(std::uint32_t ranks, const LayoutPlan& plan,
                                    std::uint64_t steps) {
  std::vector<ModelState> states = {ModelState::First()};
  std::vector<std::array<Half, kHalves>> averages(plan.buckets.size());
  while (states.size() <= steps) {
    for (std::size_t bucket = 0; bucket < averages.size(); ++bucket) {
      for (int half = 0; half < kHalves; ++half) {
        averages[bucket][static_cast<std::size_t>(half)] =
            Average(ranks, states.back(), plan.buckets[bucket].dtype, bucket, half);
      }
    }
    states.push_back(states.back().After(averages));
  }
  return states;
}

}  // namespace gradsync::daemon
