// The training of digits_trainer in one process, without gradsync. Its result is the reference for
// that of the ranks.

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/statusor.h"
#include "client/examples/digits_data.h"
#include "client/examples/mlp.h"
#include "client/examples/recipe.h"
#include "client/examples/reference_training.h"

ABSL_FLAG(std::string, data, "client/examples/data/digits.csv.gz", "The handwritten digits.");
ABSL_FLAG(std::string, save, "", "Writes the final parameters to this file, as float32.");
ABSL_FLAG(std::uint64_t, steps, gradsync::examples::Recipe().steps, "How many steps to train.");
ABSL_FLAG(std::uint64_t, ranks, 2, "How many ranks share each batch.");
ABSL_FLAG(std::uint64_t, nodes, 1, "How many nodes the ranks are on, as many on each.");
ABSL_FLAG(bool, whole, false, "Computes each batch at once instead of adding the ranks' shards.");

namespace gradsync::examples {
namespace {

bool Run() {
  Recipe recipe;
  recipe.steps = absl::GetFlag(FLAGS_steps);
  const std::size_t ranks = absl::GetFlag(FLAGS_ranks);
  const std::size_t nodes = absl::GetFlag(FLAGS_nodes);
  if (ranks == 0 || nodes == 0 || ranks % nodes != 0 || recipe.GlobalBatch(ranks) == 0) {
    std::fprintf(stderr, "digits_reference: --ranks has to be a multiple of --nodes, at most %zu\n",
                 recipe.largest_batch);
    return false;
  }
  const absl::StatusOr<Digits> digits = LoadDigits(absl::GetFlag(FLAGS_data));
  if (!digits.ok()) {
    std::fprintf(stderr, "digits_reference: %s\n", std::string(digits.status().message()).c_str());
    return false;
  }
  Mlp model(recipe.widths, recipe.seed);
  const bool whole = absl::GetFlag(FLAGS_whole);
  TrainReference(*digits, recipe, ranks, whole ? 1 : ranks, whole ? 1 : nodes, &model);
  std::ofstream file(absl::GetFlag(FLAGS_save), std::ios::binary);
  file.write(reinterpret_cast<const char*>(model.values().data()),
             static_cast<std::streamsize>(model.values().size() * sizeof(float)));
  file.close();
  if (!file) std::fprintf(stderr, "digits_reference: cannot write the file of --save\n");
  return static_cast<bool>(file);
}

}  // namespace
}  // namespace gradsync::examples

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("trains on the digits alone, adding shards in the ranks' order.");
  absl::ParseCommandLine(argc, argv);
  return gradsync::examples::Run() ? 0 : 1;
}
