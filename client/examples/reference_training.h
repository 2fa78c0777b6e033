// The same training without gradsync, in one process: the reference for the trainers' result.

#ifndef CLIENT_EXAMPLES_REFERENCE_TRAINING_H_
#define CLIENT_EXAMPLES_REFERENCE_TRAINING_H_

#include <cstddef>

#include "client/examples/digits_data.h"
#include "client/examples/mlp.h"
#include "client/examples/recipe.h"

namespace gradsync::examples {

// Trains `model`, freshly made by the recipe, on the batches that `ranks` trainers would share.
// Each batch is cut into `shards` equal parts (a divisor of the global batch). The parts' gradients
// are added in the order in which the daemons of `nodes` nodes (a divisor of shards) add them:
// first on each node, ((g0 + g1) + g2) + ..., then those sums in the nodes' order. The sum is
// multiplied by float(1 / shards). With shards = ranks the result is bitwise equal to the
// trainers'. With shards = 1 the whole batch is computed at once, which rounds differently.
void TrainReference(const Digits& digits, const Recipe& recipe, std::size_t ranks,
                    std::size_t shards, std::size_t nodes, Mlp* model);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_REFERENCE_TRAINING_H_
