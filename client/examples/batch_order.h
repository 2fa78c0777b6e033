// Which samples make up which batch. The answer is the same in every process, so no rank has to
// tell another.

#ifndef CLIENT_EXAMPLES_BATCH_ORDER_H_
#define CLIENT_EXAMPLES_BATCH_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/examples/digits_data.h"

namespace gradsync::examples {

// Shuffles the samples anew for each pass over them. Samples that do not fill a batch at a pass's
// end are left out. Not thread-safe.
class BatchOrder {
 public:
  // `samples` outlives this object. 0 < global_batch <= samples.size().
  BatchOrder(const Samples& samples, std::size_t global_batch, std::uint64_t seed);

  // Part `shard` of the `shards` equal parts of the batch of step 1, 2, ...; global_batch is a
  // multiple of shards.
  Samples Shard(std::uint64_t step, std::size_t shard, std::size_t shards);

 private:
  void Shuffle(std::uint64_t pass);

  const Samples& samples_;
  const std::size_t global_batch_;
  const std::size_t batches_per_pass_;
  const std::uint64_t seed_;
  std::uint64_t pass_;
  std::vector<std::size_t> order_;  // of pass_
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_BATCH_ORDER_H_
