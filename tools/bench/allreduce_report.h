// The figures of `allreduce`: from turns to rows, and rows as table and JSON.

#ifndef TOOLS_BENCH_ALLREDUCE_REPORT_H_
#define TOOLS_BENCH_ALLREDUCE_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "proto/gradsync/data_type.h"
#include "tools/bench/contest.h"
#include "tools/bench/implementation.h"

namespace gradsync::bench {

// What all rows of a run have in common.
struct AllReduceRun {
  std::uint32_t ranks = 0;  // of all nodes
  std::uint32_t nodes = 1;
  std::uint32_t gpus = 0;  // 0: host memory
  DataType dtype = DataType::kFloat32;
  std::uint64_t bits_per_second = 0;  // of each node's link, each way; 0: unlimited
};

// One implementation at one size.
struct AllReduceRow {
  Implementation implementation = Implementation::kRoofline;
  std::uint64_t bytes = 0;
  AllReduceRun run;
  double time_us_p50 = 0;
  double time_us_p99 = 0;
  double algbw_gbps = 0;  // 10^9 bytes/s at the p50
  double busbw_gbps = 0;
  // Read and written by a GPU's reduction of its ranks, or by as many copies; none of the others.
  std::optional<double> moved_gbps;
  std::uint64_t wrong = 0;
  double cpu_seconds = 0;  // of one all-reduce, mean
  // The roofline's time / this time, paired by iteration; none without a roofline.
  std::optional<double> roofline_ratio_p50;
  std::optional<double> roofline_ratio_p10;
  // Share of the p50 for which a node's link must be busy, each way, without headers: with the
  // fewest bytes, 2(n-1)/n of the size over n nodes. None where links are unlimited.
  std::optional<double> wire_utilisation;
};

// In the order of `scores`.
std::vector<AllReduceRow> MakeRows(const std::vector<Score>& scores, std::uint64_t bytes,
                                   const AllReduceRun& run);

// The median of other.time / one.time over the iterations: how many times as fast `one` is.
double PairedSpeed(const Score& one, const Score& other);

// Two lines, each with a newline.
std::string TableHead(const AllReduceRun& run);
std::string TableRow(const AllReduceRow& row);
// "# 25M: kernels move 4012 GB/s, 0.91 of what copies do", or "" without the two.
std::string MovedLine(const std::vector<AllReduceRow>& rows);
// "# 25M: gradsync is 3.1 times as fast as openmpi, ...", or "" if there is nobody to compare with.
std::string SpeedLine(const std::vector<Score>& scores, std::uint64_t bytes);

// Rows of GPUs say so (gpus, moved_gbps).
nlohmann::json ToJson(const std::vector<AllReduceRow>& rows);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_ALLREDUCE_REPORT_H_
