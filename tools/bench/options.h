// gradsync-bench's command line.

#ifndef TOOLS_BENCH_OPTIONS_H_
#define TOOLS_BENCH_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/gradsync/data_type.h"
#include "tools/bench/implementation.h"

namespace gradsync::bench {

enum class Command : std::uint8_t { kHelp, kAllReduce, kHandoff };

struct Options {
  Command command = Command::kHelp;

  // ---- allreduce ----
  // Bytes of each rank's buffer: begin, begin * factor, ... and `end` itself.
  std::uint64_t begin_bytes = std::uint64_t{64} << 10;
  std::uint64_t end_bytes = std::uint64_t{100} << 20;
  std::uint64_t factor = 4;
  DataType dtype = DataType::kFloat32;
  // Empty: every one that this machine has.
  std::vector<Implementation> implementations;

  // ---- both ----
  std::uint32_t ranks = 2;  // of each node
  std::uint32_t nodes = 1;
  std::uint64_t bits_per_second = 0;  // of each node's link; 0: as fast as memory
  bool busy = false;
  std::uint32_t gpus = 0;  // on which the ranks lie, in turns; 0: host memory
  std::string cuda_library = "libcuda.so.1";
  std::string nccl_library = "libnccl.so.2";
  std::uint64_t iterations = 40;  // handoff: 1000; p50 of few is shaky
  std::uint64_t warmup = 5;       // handoff: 50
  std::uint32_t threads = 0;      // 0: one per core
  std::string daemon;             // empty: found
  std::string json;               // empty: none
};

// INVALID_ARGUMENT lists every fault, one per line; main prints it and exits with 2.
absl::StatusOr<Options> ParseOptions(const std::vector<absl::string_view>& arguments);

// The sizes that allreduce measures, ascending.
std::vector<std::uint64_t> Sizes(const Options& options);

extern const absl::string_view kHelp;

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_OPTIONS_H_
