// `gradsync-bench handoff`: what a trainer pays to hand a bucket over.

#ifndef TOOLS_BENCH_HANDOFF_BENCH_H_
#define TOOLS_BENCH_HANDOFF_BENCH_H_

#include "absl/status/status.h"
#include "tools/bench/options.h"

namespace gradsync::bench {

// Prints a row per bucket size, the empty bucket first. Statuses are those of RunAllReduceBench().
absl::Status RunHandoffBench(const Options& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_HANDOFF_BENCH_H_
