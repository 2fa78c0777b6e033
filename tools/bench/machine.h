// What the figures were measured on.

#ifndef TOOLS_BENCH_MACHINE_H_
#define TOOLS_BENCH_MACHINE_H_

#include <cstdint>
#include <optional>
#include <string>

namespace gradsync::bench {

// Cores that this process may run on.
std::uint32_t UsableCores();

// Nanoseconds for a cache line to go from one core to another and back: tells which of its states a
// virtual machine is in. nullopt if only one core can be used. Takes some milliseconds.
std::optional<double> CacheLineRoundTripNs();

// "AMD EPYC, 2 cores, Linux 6.1.0, 2026-01-31 12:00 UTC, cache line 58 ns there and back".
std::string DescribeMachine();

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_MACHINE_H_
