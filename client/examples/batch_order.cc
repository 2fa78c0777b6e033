#include "client/examples/batch_order.h"

#include <numeric>
#include <utility>

#include "client/examples/random.h"

namespace gradsync::examples {

BatchOrder::BatchOrder(const Samples& samples, std::size_t global_batch, std::uint64_t seed)
    : samples_(samples),
      global_batch_(global_batch),
      batches_per_pass_(samples.size() / global_batch),
      seed_(seed),
      order_(samples.size()) {
  Shuffle(0);
}

void BatchOrder::Shuffle(std::uint64_t pass) {
  pass_ = pass;
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  Random random(seed_ + pass);
  for (std::size_t i = order_.size(); i > 1; --i) {
    std::swap(order_[i - 1], order_[random.NextBelow(i)]);
  }
}

Samples BatchOrder::Shard(std::uint64_t step, std::size_t shard, std::size_t shards) {
  const std::uint64_t pass = (step - 1) / batches_per_pass_;
  if (pass != pass_) Shuffle(pass);
  const std::size_t count = global_batch_ / shards;
  const std::size_t first = (step - 1) % batches_per_pass_ * global_batch_ + shard * count;
  Samples samples;
  for (std::size_t i = first; i < first + count; ++i) {
    samples.Append(&samples_.pixels[order_[i] * kPixels], samples_.labels[order_[i]]);
  }
  return samples;
}

}  // namespace gradsync::examples
