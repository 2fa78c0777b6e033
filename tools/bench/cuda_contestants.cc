#include "tools/bench/cuda_contestants.h"

namespace gradsync::bench {

std::unique_ptr<Contestant> MakeCudaContestant(const std::string& name,
                                               const ContestantOptions& options) {
  if (name == "roofline") return MakeCudaRooflineContestant(options);
  if (name == "kernels") return MakeCudaKernelsContestant(options);
  if (name == "gradsync") return MakeCudaGradsyncContestant(options);
  if (name == "nccl") return MakeCudaNcclContestant(options);
  return nullptr;
}

}  // namespace gradsync::bench
