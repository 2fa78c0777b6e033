#include "tools/bench/allreduce_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/bench/byte_size.h"
#include "tools/bench/quantile.h"
#include "tools/virtual_network/bit_rate.h"

namespace gradsync::bench {
namespace {

const Score* Find(const std::vector<Score>& scores, Implementation implementation) {
  const auto found = std::find_if(scores.begin(), scores.end(), [=](const Score& score) {
    return score.implementation == implementation;
  });
  return found == scores.end() ? nullptr : &*found;
}

// other.time / one.time of each iteration.
std::vector<double> PairedRatios(const Score& one, const Score& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < one.turns.size(); ++i) {
    ratios.push_back(static_cast<double>(other.turns[i].time_ns) /
                     static_cast<double>(one.turns[i].time_ns));
  }
  return ratios;
}

// Of its buffer, what each of n members must send, and receive: nccl-tests' busbw / algbw.
double BusFactor(std::uint32_t members) { return 2.0 * (members - 1) / members; }

// Of k buffers: k and staging are read, k and staging written.
double MovedBuffers(std::uint32_t buffers) { return 2.0 * (buffers + 1); }

nlohmann::json Number(const std::optional<double>& value) {
  return value.has_value() ? nlohmann::json(*value) : nlohmann::json();
}

}  // namespace

std::vector<AllReduceRow> MakeRows(const std::vector<Score>& scores, std::uint64_t bytes,
                                   const AllReduceRun& run) {
  const Score* const roofline = Find(scores, Implementation::kRoofline);
  std::vector<AllReduceRow> rows;
  for (const Score& score : scores) {
    std::vector<double> times_us;
    double cpu_ns = 0;
    for (const Turn& turn : score.turns) {
      times_us.push_back(static_cast<double>(turn.time_ns) / 1e3);
      cpu_ns += static_cast<double>(turn.cpu_ns);
    }
    AllReduceRow row;
    row.implementation = score.implementation;
    row.bytes = bytes;
    row.run = run;
    row.time_us_p50 = Quantile(times_us, 0.5);
    row.time_us_p99 = Quantile(times_us, 0.99);
    row.algbw_gbps = static_cast<double>(bytes) / row.time_us_p50 / 1e3;
    row.busbw_gbps = row.algbw_gbps * BusFactor(run.ranks);
    if (run.gpus > 0 && (score.implementation == Implementation::kRoofline ||
                         score.implementation == Implementation::kKernels)) {
      row.moved_gbps = row.algbw_gbps * MovedBuffers(run.ranks / run.gpus);
    }
    row.wrong = score.wrong;
    row.cpu_seconds = cpu_ns / 1e9 / static_cast<double>(score.turns.size());
    if (roofline != nullptr) {
      const std::vector<double> ratios = PairedRatios(score, *roofline);
      row.roofline_ratio_p50 = Quantile(ratios, 0.5);
      row.roofline_ratio_p10 = Quantile(ratios, 0.1);
    }
    if (run.bits_per_second > 0) {
      const double bits = 8 * static_cast<double>(bytes) * BusFactor(run.nodes);
      row.wire_utilisation =
          bits / static_cast<double>(run.bits_per_second) / (row.time_us_p50 / 1e6);
    }
    rows.push_back(row);
  }
  return rows;
}

double PairedSpeed(const Score& one, const Score& other) {
  return Quantile(PairedRatios(one, other), 0.5);
}

std::string TableHead(const AllReduceRun& run) {
  return absl::StrFormat("# %10s %11s %9s %9s %11s %11s %8s %8s %8s %11s %10s\n", "size", "count",
                         "type", "impl", "time p50", "time p99", "algbw", "busbw", "#wrong",
                         run.nodes > 1 ? "wire" : "ratio", "cpu") +
         absl::StrFormat("# %10s %11s %9s %9s %11s %11s %8s %8s %8s %11s %10s\n", "(B)",
                         "(elements)", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "",
                         run.nodes > 1 ? "" : "p50  p10", "(s)");
}

std::string TableRow(const AllReduceRow& row) {
  std::string ratio = "-";
  if (row.roofline_ratio_p50.has_value()) {
    ratio = absl::StrFormat("%.2f %.2f", *row.roofline_ratio_p50, *row.roofline_ratio_p10);
  }
  if (row.wire_utilisation.has_value()) ratio = absl::StrFormat("%.3f", *row.wire_utilisation);
  return absl::StrFormat("  %10d %11d %9s %9s %11.1f %11.1f %8.2f %8.2f %8d %11s %10.6f\n",
                         row.bytes, row.bytes / ItemSize(row.run.dtype),
                         DataTypeName(row.run.dtype), ImplementationName(row.implementation),
                         row.time_us_p50, row.time_us_p99, row.algbw_gbps, row.busbw_gbps,
                         row.wrong, ratio, row.cpu_seconds);
}

std::string MovedLine(const std::vector<AllReduceRow>& rows) {
  for (const AllReduceRow& row : rows) {
    if (row.implementation != Implementation::kKernels || !row.roofline_ratio_p50.has_value()) {
      continue;
    }
    return absl::StrFormat("# %s: kernels move %.1f GB/s, %.2f of what copies do\n",
                           FormatByteSize(row.bytes), *row.moved_gbps, *row.roofline_ratio_p50);
  }
  return "";
}

std::string SpeedLine(const std::vector<Score>& scores, std::uint64_t bytes) {
  const Score* const gradsync = Find(scores, Implementation::kGradsync);
  std::string text;
  for (const Implementation other :
       {Implementation::kGloo, Implementation::kOpenMpi, Implementation::kNccl}) {
    const Score* const score = Find(scores, other);
    if (gradsync == nullptr || score == nullptr) continue;
    absl::StrAppendFormat(&text, "%s %.2f times as fast as %s", text.empty() ? "" : ",",
                          PairedSpeed(*gradsync, *score), ImplementationName(other));
  }
  if (text.empty()) return "";
  return absl::StrCat("# ", FormatByteSize(bytes), ": gradsync is", text,
                      " (median over pairs of the same iteration)\n");
}

nlohmann::json ToJson(const std::vector<AllReduceRow>& rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const AllReduceRow& row : rows) {
    const std::uint64_t bits_per_second = row.run.bits_per_second;
    const nlohmann::json rate =
        bits_per_second == 0 ? nlohmann::json() : nlohmann::json(FormatBitRate(bits_per_second));
    list.push_back({{"impl", std::string(ImplementationName(row.implementation))},
                    {"bytes", row.bytes},
                    {"ranks", row.run.ranks},
                    {"nodes", row.run.nodes},
                    {"rate", rate},
                    {"dtype", DataTypeName(row.run.dtype)},
                    {"time_us_p50", row.time_us_p50},
                    {"time_us_p99", row.time_us_p99},
                    {"algbw_gbps", row.algbw_gbps},
                    {"busbw_gbps", row.busbw_gbps},
                    {"wrong", row.wrong},
                    {"cpu_seconds", row.cpu_seconds},
                    {"roofline_ratio_p50", Number(row.roofline_ratio_p50)},
                    {"roofline_ratio_p10", Number(row.roofline_ratio_p10)},
                    {"wire_utilisation", Number(row.wire_utilisation)}});
    if (row.run.gpus > 0) {
      list.back()["gpus"] = row.run.gpus;
      list.back()["moved_gbps"] = Number(row.moved_gbps);
    }
  }
  return list;
}

}  // namespace gradsync::bench
