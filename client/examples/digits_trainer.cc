// One rank of the digits example; digits_quickstart starts several. Reports are JSON lines
// (report.h); errors are words.

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/examples/command_line.h"
#include "client/examples/digits_data.h"
#include "client/examples/mlp.h"
#include "client/examples/recipe.h"
#include "client/examples/reference_training.h"
#include "client/examples/report.h"
#include "client/examples/synchronized_training.h"
#include "gradsync/client.h"

namespace gradsync::examples {
namespace {

constexpr char kIntroduction[] =
    R"(digits_trainer: trains a small network on handwritten digits, as one rank of a gradsync job.

Rank, world size and job come from RANK, WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_ADDR and
MASTER_PORT, the daemon's socket from GRADSYNC_SOCKET. With --reference it trains alone, without
gradsync, on the batches that --ranks trainers would share.
)";

struct Options {
  std::string data;
  std::string save;
  std::string overlap = "on";
  std::string reference;
  std::uint64_t ranks = 2;
  std::uint64_t nodes = 1;
  bool hold = false;
  Recipe recipe;
};

Overlap ParseOverlap(const std::string& text) {
  return text == "alternate" ? Overlap::kAlternate : text == "off" ? Overlap::kOff : Overlap::kOn;
}

absl::Status Save(const std::string& path, Mlp* model) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(model->values().data()),
             static_cast<std::streamsize>(model->values().size() * sizeof(float)));
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

void Print(const Report& report) {
  const std::string line = FormatReport(report);
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

// Until whoever started this process closes its end of standard input.
void WaitForEndOfInput() {
  char ignored[256];
  while (read(STDIN_FILENO, ignored, sizeof(ignored)) > 0) {
  }
}

absl::Status RunReference(const Options& options, const Digits& digits) {
  Mlp model(options.recipe.widths, options.recipe.seed);
  const bool sharded = options.reference == "sharded";
  TrainReference(digits, options.recipe, options.ranks, sharded ? options.ranks : 1,
                 sharded ? options.nodes : 1, &model);
  return Save(options.save, &model);
}

absl::Status RunRank(const Options& options, const Digits& digits) {
  absl::StatusOr<SessionOptions> session_options = SessionOptions::FromEnvironment();
  if (!session_options.ok()) return session_options.status();
  if (options.recipe.GlobalBatch(session_options->world_size) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("WORLD_SIZE ", session_options->world_size,
                                                   " leaves a rank without a sample; at most ",
                                                   options.recipe.largest_batch));
  }
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Join(*session_options);
  if (!session.ok()) return session.status();
  // Every rank draws weights of its own, and then gets rank 0's.
  Mlp model(options.recipe.widths, options.recipe.seed + (*session)->rank());
  absl::Status status = TrainSynchronized(digits, options.recipe, ParseOverlap(options.overlap),
                                          session->get(), &model, Print);
  if (status.ok()) status = Save(options.save, &model);
  if (!status.ok()) return status;
  if (options.hold) WaitForEndOfInput();
  return (*session)->Leave();
}

absl::Status Run(const Options& options) {
  absl::StatusOr<Digits> digits = LoadDigits(options.data);
  if (!digits.ok()) return digits.status();
  return options.reference.empty() ? RunRank(options, *digits) : RunReference(options, *digits);
}

int Main(int argc, char** argv) {
  Options options;
  CommandLine flags(kIntroduction);
  flags.Text("data", "FILE", "The digits (digits.csv.gz). Required.", &options.data);
  flags.Text("save", "FILE", "Writes the final parameters there, as float32.", &options.save);
  flags.Number("steps", "How many steps to train.", 1, 1'000'000, &options.recipe.steps);
  flags.Choice("overlap", {"on", "off", "alternate"},
               "When buckets are marked ready: as soon as they are written (default), after the\n"
               "backward pass, or the two in turn.",
               &options.overlap);
  flags.Switch("hold", "Keeps the session until standard input is closed.", &options.hold);
  flags.Choice(
      "reference", {"sharded", "whole"},
      "Trains without gradsync: on as many shards as there are ranks, or on whole batches.",
      &options.reference);
  flags.Number("ranks", "With --reference: whose batches to use.", 1, 128, &options.ranks);
  flags.Number("nodes",
               "With --reference sharded: on how many nodes the ranks are, as many on each.", 1,
               128, &options.nodes);
  absl::StatusOr<bool> run = flags.Parse(argc, argv);
  if (run.ok() && *run && options.data.empty()) {
    run = absl::InvalidArgumentError("--data is required");
  }
  if (run.ok() && *run && options.ranks % options.nodes != 0) {
    run = absl::InvalidArgumentError("--ranks is no multiple of --nodes");
  }
  if (!run.ok()) {
    std::fprintf(stderr, "digits_trainer: %s (see --help)\n",
                 std::string(run.status().message()).c_str());
    return 2;
  }
  if (!*run) {
    std::fputs(flags.Help().c_str(), stdout);
    return 0;
  }
  const absl::Status status = Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "digits_trainer: %s\n",
               status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
  return 1;
}

}  // namespace
}  // namespace gradsync::examples

int main(int argc, char** argv) { return gradsync::examples::Main(argc, argv); }
