// In place of the cuda_* files where CUDA's headers are missing.

#include "absl/status/status.h"
#include "tools/bench/cuda_contestants.h"

namespace gradsync::bench {
namespace {

absl::Status Absent() {
  return absl::UnimplementedError(
      "this bench-rank was built without CUDA; build it where tools/find_cuda finds a toolkit");
}

class AbsentContestant final : public Contestant {
 public:
  absl::Status Connect() override { return Absent(); }
  absl::Status SetUp(std::size_t) override { return Absent(); }
  std::byte* buffer() override { return nullptr; }
  absl::Status AllReduce(Turn*) override { return Absent(); }
  absl::Status TearDown() override { return Absent(); }
};

}  // namespace

std::unique_ptr<Contestant> MakeCudaContestant(const std::string&, const ContestantOptions&) {
  return std::make_unique<AbsentContestant>();
}

}  // namespace gradsync::bench
