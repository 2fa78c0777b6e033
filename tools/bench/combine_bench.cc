// combine-bench: what a bucket's statistics (sum of squares, elements that are not finite) cost the
// reduction that gathers them.
//
//   combine-bench [DTYPE [RANKS [ITERATIONS]]]        default: float32 2 200
//
// Averages RANKS buffers of 1, 25 and 100 MiB on one thread, without statistics and with, by turns
// and in alternating order. Prints the medians of both, and of the ratio with / without of the
// pairs: a virtual machine's memory may be twice as slow from one second to the next, so only pairs
// can be compared.

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "daemon/base/clock.h"
#include "daemon/reduce/combine.h"
#include "tools/bench/pattern.h"

namespace gradsync::bench {
namespace {

constexpr int kUsage = 2;

struct Bench {
  DataType dtype = DataType::kFloat32;
  std::uint32_t ranks = 2;
  std::uint32_t iterations = 200;
};

// Nearest rank; 0 < q < 1.
double Quantile(std::vector<double> samples, double q) {
  const auto nth =
      samples.begin() + static_cast<std::ptrdiff_t>(q * static_cast<double>(samples.size()));
  std::nth_element(samples.begin(), nth, samples.end());
  return *nth;
}

double CombineUs(const Bench& bench, const std::vector<std::byte*>& buffers, std::size_t count,
                 daemon::GradientStats* stats) {
  const std::uint64_t start_ns = daemon::MonotonicNowNs();
  daemon::Combine(bench.dtype, buffers, count, 1.0 / bench.ranks, stats);
  return static_cast<double>(daemon::MonotonicNowNs() - start_ns) / 1000.0;
}

bool Measure(const Bench& bench, std::size_t mib) {
  const std::size_t bytes = mib << 20;
  const std::size_t count = bytes / ItemSize(bench.dtype);
  const Pattern pattern(bench.dtype, bench.ranks);
  std::vector<std::byte*> buffers;
  for (std::uint32_t rank = 0; rank < bench.ranks; ++rank) {
    // As the arenas are: shared memory.
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) return false;
    buffers.push_back(static_cast<std::byte*>(memory));
    // Averaging averages again does not change them.
    pattern.Fill(rank, 0, buffers.back(), count);
  }
  std::vector<double> without, with, ratios;
  daemon::GradientStats stats;
  for (std::uint32_t i = 0; i < bench.iterations; ++i) {
    double us[2];
    for (const std::uint32_t turn : {i % 2, 1 - i % 2}) {
      us[turn] = CombineUs(bench, buffers, count, turn == 0 ? nullptr : &stats);
    }
    without.push_back(us[0]);
    with.push_back(us[1]);
    ratios.push_back(us[1] / us[0]);
  }
  std::printf("%7zu  %11.1f  %9.1f  %9.3f  %7.3f  %7.3f\n", mib, Quantile(without, 0.5),
              Quantile(with, 0.5), Quantile(ratios, 0.5), Quantile(ratios, 0.1),
              Quantile(ratios, 0.9));
  for (std::byte* buffer : buffers) munmap(buffer, bytes);
  return true;
}

int Run(const std::vector<absl::string_view>& arguments) {
  Bench bench;
  bool good = arguments.size() <= 3;
  if (!arguments.empty()) {
    bench.dtype = DataType::kUnspecified;
    for (const DataType dtype :
         {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBfloat16}) {
      if (arguments[0] == DataTypeName(dtype)) bench.dtype = dtype;
    }
    good = good && bench.dtype != DataType::kUnspecified;
  }
  if (arguments.size() > 1) good = good && absl::SimpleAtoi(arguments[1], &bench.ranks);
  if (arguments.size() > 2) good = good && absl::SimpleAtoi(arguments[2], &bench.iterations);
  if (!good || bench.ranks < 1 || bench.ranks > kMaxRanks || bench.iterations < 1) {
    std::fprintf(stderr, "Usage: combine-bench [DTYPE [RANKS (1-8) [ITERATIONS]]]\n");
    return kUsage;
  }
  std::printf("%s, %u ranks, one thread, %s\n", arguments.empty() ? "float32" : arguments[0].data(),
              bench.ranks, daemon::CombineTarget());
  std::printf("    MiB  without, us  with, us  ratio p50      p10      p90\n");
  for (const std::size_t mib : {1, 25, 100}) {
    if (!Measure(bench, mib)) {
      std::perror("combine-bench: mmap");
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace gradsync::bench

int main(int argc, char** argv) {
  return gradsync::bench::Run(std::vector<absl::string_view>(argv + 1, argv + argc));
}
