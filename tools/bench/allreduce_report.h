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

// One implementation at one size.
struct AllReduceRow {
  Implementation implementation = Implementation::kRoofline;
  std::uint64_t bytes = 0;
  std::uint32_t ranks = 0;
  DataType dtype = DataType::kFloat32;
  double time_us_p50 = 0;
  double time_us_p99 = 0;
  double algbw_gbps = 0;  // 10^9 bytes/s at the p50
  double busbw_gbps = 0;
  std::uint64_t wrong = 0;
  double cpu_seconds = 0;  // of one all-reduce, mean
  // The roofline's time / this time, paired by iteration; none without a roofline.
  std::optional<double> roofline_ratio_p50;
  std::optional<double> roofline_ratio_p10;
};

// In the order of `scores`.
std::vector<AllReduceRow> MakeRows(const std::vector<Score>& scores, std::uint64_t bytes,
                                   std::uint32_t ranks, DataType dtype);

// The median of other.time / one.time over the iterations: how many times as fast `one` is.
double PairedSpeed(const Score& one, const Score& other);

// Two lines, each with a newline.
std::string TableHead();
std::string TableRow(const AllReduceRow& row);
// "# 25M: gradsync is 3.1 times as fast as openmpi, ...", or "" if there is nobody to compare with.
std::string SpeedLine(const std::vector<Score>& scores, std::uint64_t bytes);

nlohmann::json ToJson(const std::vector<AllReduceRow>& rows);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_ALLREDUCE_REPORT_H_
