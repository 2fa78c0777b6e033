#include "tools/bench/contestant.h"

#include "absl/strings/str_cat.h"
#include "tools/bench/cuda_contestants.h"
#include "tools/bench/gradsync_contestant.h"

namespace gradsync::bench {
namespace {

std::unique_ptr<Contestant> MakeHostContestant(const std::string& name,
                                               const ContestantOptions& options) {
  if (name == "roofline") return MakeRooflineContestant(options);
  if (name == "gradsync") return std::make_unique<GradsyncContestant>(options);
  if (name == "gloo") return MakeGlooContestant(options, /*faulty=*/false);
  if (name == "openmpi") return MakeOpenMpiContestant(options);
  if (name == "faulty") return MakeGlooContestant(options, /*faulty=*/true);
  return nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Contestant>> MakeContestant(const std::string& name,
                                                           const ContestantOptions& options) {
  auto contestant =
      options.gpus > 0 ? MakeCudaContestant(name, options) : MakeHostContestant(name, options);
  if (contestant != nullptr) return contestant;
  return absl::InvalidArgumentError(absl::StrCat("bench-rank has no implementation ", name));
}

}  // namespace gradsync::bench
