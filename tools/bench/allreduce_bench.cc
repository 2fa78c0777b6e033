#include "tools/bench/allreduce_bench.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/bench/allreduce_report.h"
#include "tools/bench/byte_size.h"
#include "tools/bench/contest.h"
#include "tools/bench/json_file.h"
#include "tools/bench/lineup.h"
#include "tools/bench/machine.h"
#include "tools/bench/progress.h"

namespace gradsync::bench {
namespace {

void Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

AllReduceRun RunOf(const Options& options, const Lineup& lineup) {
  AllReduceRun run;
  run.ranks = options.ranks * options.nodes;
  run.nodes = options.nodes;
  run.gpus = options.gpus;
  run.dtype = options.dtype;
  run.bits_per_second = lineup.bits_per_second;
  return run;
}

std::string Head(const AllReduceRun& run, const Lineup& lineup) {
  const ContestOptions& contest = lineup.contest;
  std::string text = absl::StrCat("# gradsync-bench allreduce: ", contest.ranks, " ranks");
  if (run.nodes > 1) absl::StrAppend(&text, " on each of ", run.nodes, " nodes");
  if (run.gpus > 0) absl::StrAppend(&text, " on ", run.gpus, run.gpus == 1 ? " GPU" : " GPUs");
  absl::StrAppend(&text, ", ", DataTypeName(run.dtype), ", ", contest.busy ? "busy" : "idle",
                  " trainers, ", contest.threads, " reduce threads\n# ", DescribeMachine(), "\n");
  for (const std::string& note : lineup.notes) absl::StrAppend(&text, "# ", note, "\n");
  return text + TableHead(run);
}

}  // namespace

absl::Status RunAllReduceBench(const Options& options) {
  absl::StatusOr<Lineup> lineup = MakeLineup(options);
  if (!lineup.ok()) return lineup.status();
  absl::StatusOr<JsonFile> json = JsonFile::Open(options.json);
  if (!json.ok()) return json.status();
  absl::StatusOr<std::unique_ptr<Contest>> contest = Contest::Start(lineup->contest);
  if (!contest.ok()) return contest.status();
  const AllReduceRun run = RunOf(options, *lineup);
  Print(Head(run, *lineup));
  std::vector<AllReduceRow> rows;
  std::uint64_t wrong = 0;
  for (const std::uint64_t bytes : Sizes(options)) {
    absl::StatusOr<std::vector<Score>> scores;
    {
      Progress progress(FormatByteSize(bytes), options.warmup + options.iterations);
      scores = (*contest)->Run(bytes, options.warmup, options.iterations,
                               [&progress](std::uint64_t done) { progress.Done(done); });
    }
    if (!scores.ok()) return scores.status();
    const std::vector<AllReduceRow> size_rows = MakeRows(*scores, bytes, run);
    for (const AllReduceRow& row : size_rows) {
      Print(TableRow(row));
      wrong += row.wrong;
      rows.push_back(row);
    }
    Print(MovedLine(size_rows));
    Print(SpeedLine(*scores, bytes));
  }
  absl::Status status = json->Write(ToJson(rows));
  if (!status.ok()) return status;
  return wrong == 0 ? absl::OkStatus()
                    : absl::DataLossError(absl::StrCat(wrong, " elements were wrong"));
}

}  // namespace gradsync::bench
