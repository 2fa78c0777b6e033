// Counts this process's calls of each function of the fakes, in a table in the state folder. Tests
// read the table, also after the process has ended. Thread-safe.

#ifndef TESTS_FAKES_MACHINE_CALL_COUNTS_H_
#define TESTS_FAKES_MACHINE_CALL_COUNTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

inline constexpr std::size_t kMaxCountedFunctions = 256;

// Counts, instead of calls, the bytes that kernels read and write.
inline constexpr char kKernelBytes[] = "bytes of kernels";

struct CallCount {
  char function[56];  // zero-terminated; empty: this entry is free
  std::atomic<std::uint64_t> calls;
};

// The counter of `function` in this process's table. Valid until the process ends.
std::atomic<std::uint64_t>& CallCounter(const StateFolder& folder, const char* function);

// The calls of all processes, or of one.
std::uint64_t CallsOf(const StateFolder& folder, const std::string& function, int pid = 0);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_CALL_COUNTS_H_
