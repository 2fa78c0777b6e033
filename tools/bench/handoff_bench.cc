#include "tools/bench/handoff_bench.h"

#include <cstdint>
#include <cstdio>
#include <memory>
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

constexpr std::uint64_t kBucketBytes[] = {0, 64 << 10, 256 << 10, 1 << 20};

nlohmann::json Measure(const Score& score, std::uint32_t ranks) {
  std::vector<double> mark_us;
  std::vector<double> done_us;
  for (const Turn& turn : score.turns) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      mark_us.push_back(static_cast<double>(turn.mark_ns[rank]) / 1e3);
    }
    done_us.push_back(static_cast<double>(turn.time_ns) / 1e3);
  }
  return {{"mark_ready_us_p50", Quantile(mark_us, 0.5)},
          {"mark_ready_us_p99", Quantile(mark_us, 0.99)},
          {"ready_to_done_us_p50", Quantile(done_us, 0.5)},
          {"ready_to_done_us_p99", Quantile(done_us, 0.99)}};
}

}  // namespace

absl::Status RunHandoffBench(const Options& options) {
  absl::StatusOr<Lineup> lineup = MakeLineup(options);
  if (!lineup.ok()) return lineup.status();
  absl::StatusOr<JsonFile> json = JsonFile::Open(options.json);
  if (!json.ok()) return json.status();
  absl::StatusOr<std::unique_ptr<Contest>> contest = Contest::Start(lineup->contest);
  if (!contest.ok()) return contest.status();
  absl::PrintF("# gradsync-bench handoff: %d ranks, %s trainers, %d reduce threads\n# %s\n",
               options.ranks, options.busy ? "busy" : "idle", lineup->contest.threads,
               DescribeMachine());
  absl::PrintF("# %8s %18s %18s %18s %18s\n", "bucket", "MarkReady p50 (us)", "MarkReady p99 (us)",
               "to done p50 (us)", "to done p99 (us)");
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
    nlohmann::json row = Measure(scores->front(), options.ranks);
    if (bytes == 0) document = row;
    absl::PrintF("  %8s %18.1f %18.1f %18.1f %18.1f\n", FormatByteSize(bytes),
                 row["mark_ready_us_p50"].get<double>(), row["mark_ready_us_p99"].get<double>(),
                 row["ready_to_done_us_p50"].get<double>(),
                 row["ready_to_done_us_p99"].get<double>());
    std::fflush(stdout);
    row["bytes"] = bytes;
    buckets.push_back(row);
    wrong += scores->front().wrong;
  }
  // The empty bucket's figures, and every size's.
  document["ranks"] = options.ranks;
  document["busy"] = options.busy;
  document["buckets"] = buckets;
  absl::Status status = json->Write(document);
  if (!status.ok()) return status;
  return wrong == 0 ? absl::OkStatus()
                    : absl::DataLossError(absl::StrCat(wrong, " elements were wrong"));
}

}  // namespace gradsync::bench
