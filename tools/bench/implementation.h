// Who takes part in a bench.

#ifndef TOOLS_BENCH_IMPLEMENTATION_H_
#define TOOLS_BENCH_IMPLEMENTATION_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace gradsync::bench {

enum class Implementation : std::uint32_t {
  kRoofline,  // the loop that no all-reduce can beat: read and write every rank's buffer once
  kGradsync,
  kGloo,     // over loopback TCP
  kOpenMpi,  // where installed
  kFaulty,   // leaves one element per rank wrong, on purpose: shows that wrong elements are counted
  // On GPUs alone, as kRoofline and kGradsync have a form there.
  kKernels,  // those of the reduction, without daemon and messages
  kNccl,     // in the trainers' own processes
};

inline constexpr std::size_t kImplementations = 7;

inline constexpr std::array<absl::string_view, kImplementations> kImplementationNames = {
    "roofline", "gradsync", "gloo", "openmpi", "faulty", "kernels", "nccl"};

constexpr absl::string_view ImplementationName(Implementation implementation) {
  return kImplementationNames[static_cast<std::size_t>(implementation)];
}

constexpr std::optional<Implementation> ParseImplementation(absl::string_view name) {
  for (std::size_t i = 0; i < kImplementations; ++i) {
    if (kImplementationNames[i] == name) return static_cast<Implementation>(i);
  }
  return std::nullopt;
}

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_IMPLEMENTATION_H_
