#include "tools/bench/handoff_bench.h"

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "tools/bench/byte_size.h"
#include "tools/bench/contest.h"
#include "tools/bench/json_file.h"
#include "tools/bench/lineup.h"
#include "tools/bench/machine.h"
#include "tools/bench/progress.h"
#include "tools/bench/quantile.h"

namespace gradsync::bench {
namespace {

constexpr std::uint64_t kBucketBytes[] = {0, 64 << 10, 256 << 10, 1 << 20, 25 << 20};

// Turn::stages_ns, in its order.
constexpr const char* kStages[] = {"to_daemon_us_p50", "queue_us_p50", "reduce_us_p50",
                                   "to_trainer_us_p50"};

nlohmann::json Measure(const Score& score, std::uint32_t ranks) {
  std::vector<double> mark_us;
  std::vector<double> done_us;
  for (const Turn& turn : score.turns) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      mark_us.push_back(static_cast<double>(turn.mark_ns[rank]) / 1e3);
    }
    done_us.push_back(static_cast<double>(turn.time_ns) / 1e3);
  }
  nlohmann::json row = {{"mark_ready_us_p50", Quantile(mark_us, 0.5)},
                        {"mark_ready_us_p99", Quantile(mark_us, 0.99)},
                        {"ready_to_done_us_p50", Quantile(done_us, 0.5)},
                        {"ready_to_done_us_p99", Quantile(done_us, 0.99)}};
  for (std::size_t stage = 0; stage < std::size(kStages); ++stage) {
    std::vector<double> stage_us;
    for (const Turn& turn : score.turns) {
      stage_us.push_back(static_cast<double>(turn.stages_ns[stage]) / 1e3);
    }
    row[kStages[stage]] = Quantile(stage_us, 0.5);
  }
  return row;
}

void Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

std::string Columns(const std::vector<std::string>& columns, const std::string& first) {
  std::string line = absl::StrFormat("%8s", first);
  for (const std::string& column : columns) absl::StrAppendFormat(&line, " %10s", column);
  return line + "\n";
}

}  // namespace

absl::Status RunHandoffBench(const Options& options) {
  absl::StatusOr<Lineup> lineup = MakeLineup(options);
  if (!lineup.ok()) return lineup.status();
  absl::StatusOr<JsonFile> json = JsonFile::Open(options.json);
  if (!json.ok()) return json.status();
  absl::StatusOr<std::unique_ptr<Contest>> contest = Contest::Start(lineup->contest);
  if (!contest.ok()) return contest.status();
  const std::uint32_t ranks = options.ranks * options.nodes;
  Print(absl::StrFormat(
      "# gradsync-bench handoff: %d ranks on %d nodes, %s trainers, %d reduce threads\n# %s\n",
      ranks, options.nodes, options.busy ? "busy" : "idle", lineup->contest.threads,
      DescribeMachine()));
  for (const std::string& note : lineup->notes) Print(absl::StrCat("# ", note, "\n"));
  Print(
      Columns({"MarkReady", "MarkReady", "to done", "to done", "of these:", "", "", ""}, "bucket"));
  Print(Columns({"p50 (us)", "p99 (us)", "p50 (us)", "p99 (us)", "to daemon", "queue", "reduce",
                 "to trainer"},
                "size"));
  nlohmann::json document;
  nlohmann::json buckets = nlohmann::json::array();
  std::uint64_t wrong = 0;
  for (const std::uint64_t bytes : kBucketBytes) {
    absl::StatusOr<std::vector<Score>> scores;
    {
      Progress progress(FormatByteSize(bytes), options.warmup + options.iterations);
      scores = (*contest)->Run(bytes, options.warmup, options.iterations,
                               [&progress](std::uint64_t done) { progress.Done(done); });
    }
    if (!scores.ok()) return scores.status();
    nlohmann::json row = Measure(scores->front(), ranks);
    if (bytes == 0) document = row;
    std::vector<std::string> figures;
    for (const char* key :
         {"mark_ready_us_p50", "mark_ready_us_p99", "ready_to_done_us_p50", "ready_to_done_us_p99",
          kStages[0], kStages[1], kStages[2], kStages[3]}) {
      figures.push_back(absl::StrFormat("%.1f", row[key].get<double>()));
    }
    Print(Columns(figures, FormatByteSize(bytes)));
    row["bytes"] = bytes;
    buckets.push_back(row);
    wrong += scores->front().wrong;
  }
  // The empty bucket's figures, and every size's.
  document["ranks"] = ranks;
  document["nodes"] = options.nodes;
  document["busy"] = options.busy;
  document["buckets"] = buckets;
  absl::Status status = json->Write(document);
  if (!status.ok()) return status;
  return wrong == 0 ? absl::OkStatus()
                    : absl::DataLossError(absl::StrCat(wrong, " elements were wrong"));
}

}  // namespace gradsync::bench
