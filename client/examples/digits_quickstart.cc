// Starts a daemon and trainers, and shows what came out. ./tools/quickstart builds and calls this.

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/examples/command_line.h"
#include "client/examples/quickstart.h"

namespace gradsync::examples {
namespace {

constexpr char kIntroduction[] =
    R"(digits_quickstart: sees gradsync at work on this machine.

It starts a daemon in a temporary directory and some trainers, which learn handwritten digits
together: each computes gradients on its share of every batch, and the daemon averages them,
bucket by bucket, while the backward pass still runs. Then it checks the result against one
process that did the same alone, and shows what was measured. Nothing is left behind.

With several nodes there is a daemon on each, in a network namespace of its own, or, where these
cannot be made, on a loopback address of its own.

Exit code: 0 all as it has to be, 1 not (and why), 2 usage.
)";

// On all nodes: a rank is one digit in the picture.
constexpr std::uint64_t kMostRanks = 8;

// Where Bazel puts what this program uses: beside it, or, in a test, where the variable says.
std::string Runfile(const std::string& path) {
  if (const char* runfiles = std::getenv("RUNFILES_DIR")) {
    return absl::StrCat(runfiles, "/gradsync/", path);
  }
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return absl::StrCat(self.string(), ".runfiles/gradsync/", path);
}

int Main(int argc, char** argv) {
  QuickstartOptions options;
  options.programs = {Runfile("daemon/gradsyncd"), Runfile("client/examples/digits_trainer"),
                      Runfile("client/examples/data/digits.csv.gz")};
  CommandLine flags(kIntroduction);
  flags.Number("nodes", "On how many nodes; 8 trainers at most on all.", 1, 4, &options.nodes);
  flags.Number("ranks", "How many trainers on each.", 1, 8, &options.ranks);
  flags.Text("json", "FILE", "Also writes the figures there.", &options.json);
  flags.Switch("keep", "Keeps the daemon and the trainers' sessions until you press Enter.",
               &options.keep);
  flags.Number("steps", "How long to train.", 1, 1'000'000, &options.steps);
  flags.Text("daemon", "PROGRAM", "Another gradsyncd.", &options.programs.daemon);
  flags.Text("gradsyncctl", "COMMAND", "How gradsyncctl is called here.", &options.gradsyncctl);
  absl::StatusOr<bool> run = flags.Parse(argc, argv);
  if (run.ok() && *run && options.nodes * options.ranks > kMostRanks) {
    run = absl::InvalidArgumentError(absl::StrCat(
        "--nodes times --ranks is ", options.nodes * options.ranks, ", more than ", kMostRanks));
  }
  if (!run.ok()) {
    std::fprintf(stderr, "quickstart: %s (see --help)\n",
                 std::string(run.status().message()).c_str());
    return 2;
  }
  if (!*run) {
    std::fputs(flags.Help().c_str(), stdout);
    return 0;
  }
  return RunQuickstart(options, TextStyle::OfStandardOutput());
}

}  // namespace
}  // namespace gradsync::examples

int main(int argc, char** argv) { return gradsync::examples::Main(argc, argv); }
