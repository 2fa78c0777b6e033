// `gradsync-bench allreduce`.

#ifndef TOOLS_BENCH_ALLREDUCE_BENCH_H_
#define TOOLS_BENCH_ALLREDUCE_BENCH_H_

#include "absl/status/status.h"
#include "tools/bench/options.h"

namespace gradsync::bench {

// Prints the table to stdout, size by size. DATA_LOSS if an element was wrong; other statuses are
// those of Contest.
absl::Status RunAllReduceBench(const Options& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_ALLREDUCE_BENCH_H_
