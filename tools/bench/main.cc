// gradsync-bench: parse, run, return a code.

#include <cstdio>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "tools/bench/allreduce_bench.h"
#include "tools/bench/handoff_bench.h"
#include "tools/bench/interrupt.h"
#include "tools/bench/options.h"
#include "tools/bench/rank_process.h"

namespace gradsync::bench {
namespace {

constexpr int kFailed = 1;
constexpr int kUsage = 2;

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "gradsync-bench: %s\n", std::string(status.message()).c_str());
  if (code == kUsage) std::fprintf(stderr, "gradsync-bench --help explains everything.\n");
  return code;
}

int RunBench(const std::vector<absl::string_view>& arguments) {
  const absl::StatusOr<Options> options = ParseOptions(arguments);
  if (!options.ok()) return Fail(options.status(), kUsage);
  if (options->command == Command::kHelp) {
    std::fwrite(kHelp.data(), 1, kHelp.size(), stdout);
    return 0;
  }
  CatchInterrupts();
  const absl::Status status = options->command == Command::kAllReduce ? RunAllReduceBench(*options)
                                                                      : RunHandoffBench(*options);
  if (Interrupted() != 0) return 128 + Interrupted();
  if (absl::IsFailedPrecondition(status)) return Fail(status, kUsage);
  return status.ok() ? 0 : Fail(status, kFailed);
}

}  // namespace
}  // namespace gradsync::bench

int main(int argc, char** argv) {
  using namespace gradsync::bench;  // NOLINT(google-build-using-namespace): main is nothing else
  if (const std::optional<RankProcessOptions> rank = ParseRankProcessArguments(argc, argv)) {
    const absl::Status status = RunRankProcess(*rank);
    return status.ok() ? 0 : Fail(status, kFailed);
  }
  return RunBench(std::vector<absl::string_view>(argv + 1, argv + argc));
}
