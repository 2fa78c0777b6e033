#include "tools/bench/handoff_bench.h"

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
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
// A GPU's bucket has an element.
constexpr std::uint64_t kGpuBucketBytes[] = {8, 64 << 10, 1 << 20, 25 << 20};

// Turn::stages_ns, in its order.
constexpr const char* kStages[] = {"to_daemon_us_p50", "queue_us_p50", "reduce_us_p50",
                                   "to_trainer_us_p50"};

struct Column {
  const char* key;  // in the JSON
  const char* head;
  const char* unit;
};

constexpr Column kColumns[] = {{"mark_ready_us_p50", "MarkReady", "p50 (us)"},
                               {"mark_ready_us_p99", "MarkReady", "p99 (us)"},
                               {"ready_to_done_us_p50", "to done", "p50 (us)"},
                               {"ready_to_done_us_p99", "to done", "p99 (us)"},
                               {kStages[0], "of these:", "to daemon"},
                               {kStages[1], "", "queue"},
                               {kStages[2], "", "reduce"},
                               {kStages[3], "", "to trainer"}};

constexpr Column kGpuColumns[] = {{"mark_ready_us_p50", "MarkReady", "p50 (us)"},
                                  {"enqueued_us_p50", "enqueued", "p50 (us)"},
                                  {"enqueued_us_p99", "enqueued", "p99 (us)"},
                                  {"in_process_us_p50", "in process", "p50 (us)"},
                                  {"added_us_p50", "added", "p50 (us)"},
                                  {"host_synchronizations", "syncs", ""},
                                  {"ready_to_done_us_p50", "to done", "p50 (us)"},
                                  {"in_process_done_us_p50", "in process", "p50 (us)"}};

// What a GPU's trainer pays, beside a call in its own process.
void MeasureEnqueue(const Score& gradsync, const Score& in_process, std::uint32_t ranks,
                    nlohmann::json* row) {
  std::vector<double> enqueued_us;
  std::vector<double> in_process_us;
  std::vector<double> added_us;
  std::vector<double> done_us;
  std::uint64_t host_synchronizations = 0;
  for (std::size_t i = 0; i < gradsync.turns.size(); ++i) {
    const Turn& ours = gradsync.turns[i];
    const Turn& theirs = in_process.turns[i];
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      enqueued_us.push_back(static_cast<double>(ours.enqueue_ns[rank]) / 1e3);
      in_process_us.push_back(static_cast<double>(theirs.enqueue_ns[rank]) / 1e3);
      added_us.push_back(enqueued_us.back() - in_process_us.back());
    }
    done_us.push_back(static_cast<double>(theirs.time_ns) / 1e3);
    host_synchronizations += ours.host_synchronizations;
  }
  (*row)["enqueued_us_p50"] = Quantile(enqueued_us, 0.5);
  (*row)["enqueued_us_p99"] = Quantile(enqueued_us, 0.99);
  (*row)["in_process_us_p50"] = Quantile(in_process_us, 0.5);
  (*row)["added_us_p50"] = Quantile(added_us, 0.5);
  (*row)["in_process_done_us_p50"] = Quantile(done_us, 0.5);
  (*row)["host_synchronizations"] = host_synchronizations;
}

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

// One line of the table; `text` of each column.
template <typename Text>
std::string Line(absl::Span<const Column> columns, const std::string& first, const Text& text) {
  std::string line = absl::StrFormat("%8s", first);
  for (const Column& column : columns) absl::StrAppendFormat(&line, " %10s", text(column));
  return line + "\n";
}

std::string Head(const Options& options, const Lineup& lineup, absl::Span<const Column> columns) {
  const std::string where = options.gpus > 0 ? absl::StrCat(options.gpus, " GPUs")
                                             : absl::StrCat(options.nodes, " nodes");
  std::string text = absl::StrFormat(
      "# gradsync-bench handoff: %d ranks on %s, %s trainers, %d reduce threads\n# %s\n",
      options.ranks * options.nodes, where, options.busy ? "busy" : "idle", lineup.contest.threads,
      DescribeMachine());
  for (const std::string& note : lineup.notes) absl::StrAppend(&text, "# ", note, "\n");
  return text + Line(columns, "bucket", [](const Column& column) { return column.head; }) +
         Line(columns, "size", [](const Column& column) { return column.unit; });
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
  const bool on_gpus = options.gpus > 0;
  const absl::Span<const Column> columns = on_gpus ? absl::MakeConstSpan(kGpuColumns) : kColumns;
  const absl::Span<const std::uint64_t> sizes =
      on_gpus ? absl::MakeConstSpan(kGpuBucketBytes) : kBucketBytes;
  Print(Head(options, *lineup, columns));
  nlohmann::json document;
  nlohmann::json buckets = nlohmann::json::array();
  std::uint64_t wrong = 0;
  for (const std::uint64_t bytes : sizes) {
    absl::StatusOr<std::vector<Score>> scores;
    {
      Progress progress(FormatByteSize(bytes), options.warmup + options.iterations);
      scores = (*contest)->Run(bytes, options.warmup, options.iterations,
                               [&progress](std::uint64_t done) { progress.Done(done); });
    }
    if (!scores.ok()) return scores.status();
    nlohmann::json row = Measure(scores->front(), ranks);
    if (on_gpus) MeasureEnqueue(scores->front(), scores->back(), ranks, &row);
    if (bytes == sizes.front()) document = row;
    Print(Line(columns, FormatByteSize(bytes), [&row](const Column& column) {
      const nlohmann::json& value = row[column.key];
      return value.is_number_integer() ? value.dump()
                                       : absl::StrFormat("%.1f", value.get<double>());
    }));
    row["bytes"] = bytes;
    buckets.push_back(row);
    wrong += scores->front().wrong;
  }
  // The smallest bucket's figures, and every size's.
  document["ranks"] = ranks;
  if (on_gpus) document["gpus"] = options.gpus;
  document["nodes"] = options.nodes;
  document["busy"] = options.busy;
  document["buckets"] = buckets;
  absl::Status status = json->Write(document);
  if (!status.ok()) return status;
  return wrong == 0 ? absl::OkStatus()
                    : absl::DataLossError(absl::StrCat(wrong, " elements were wrong"));
}

}  // namespace gradsync::bench
