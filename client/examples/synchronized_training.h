// Data-parallel training through gradsync: the part of this example that a real trainer would look
// like.

#ifndef CLIENT_EXAMPLES_SYNCHRONIZED_TRAINING_H_
#define CLIENT_EXAMPLES_SYNCHRONIZED_TRAINING_H_

#include <functional>

#include "absl/status/status.h"
#include "client/examples/digits_data.h"
#include "client/examples/mlp.h"
#include "client/examples/recipe.h"
#include "client/examples/report.h"
#include "gradsync/client.h"

namespace gradsync::examples {

// When buckets are marked ready: as soon as they are written, after the backward pass, or the two
// in turn (which compares them under the same conditions).
enum class Overlap { kOn, kOff, kAlternate };

// Trains `model` as rank session->rank() of session->world_size(), beginning with rank 0's
// parameters. Calls `report` on this thread. Returns the first error of the session, with the step
// it came in.
absl::Status TrainSynchronized(const Digits& digits, const Recipe& recipe, Overlap overlap,
                               Session* session, Mlp* model,
                               const std::function<void(const Report&)>& report);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_SYNCHRONIZED_TRAINING_H_
