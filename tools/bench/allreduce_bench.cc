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

std::string Head(const Options& options, const Lineup& lineup) {
  std::string text =
      absl::StrCat("# gradsync-bench allreduce: ", options.ranks, " ranks, ",
                   DataTypeName(options.dtype), ", ", options.busy ? "busy" : "idle", " trainers, ",
                   lineup.contest.threads, " reduce threads\n# ", DescribeMachine(), "\n");
  for (const std::string& note : lineup.notes) absl::StrAppend(&text, "# ", note, "\n");
  return text + TableHead();
}

}  // namespace

absl::Status RunAllReduceBench(const Options& options) {
  absl::StatusOr<Lineup> lineup = MakeLineup(options);
  if (!lineup.ok()) return lineup.status();
  absl::StatusOr<JsonFile> json = JsonFile::Open(options.json);
  if (!json.ok()) return json.status();
  absl::StatusOr<std::unique_ptr<Contest>> contest = Contest::Start(lineup->contest);
  if (!contest.ok()) return contest.status();
  Print(Head(options, *lineup));
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
    for (const AllReduceRow& row : MakeRows(*scores, bytes, options.ranks, options.dtype)) {
      Print(TableRow(row));
      wrong += row.wrong;
      rows.push_back(row);
    }
    Print(SpeedLine(*scores, bytes));
  }
  absl::Status status = json->Write(ToJson(rows));
  if (!status.ok()) return status;
  return wrong == 0 ? absl::OkStatus()
                    : absl::DataLossError(absl::StrCat(wrong, " elements were wrong"));
}

}  // namespace gradsync::bench
