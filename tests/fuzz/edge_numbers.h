// Numbers at which code that reads numbers tends to be wrong.

#ifndef TESTS_FUZZ_EDGE_NUMBERS_H_
#define TESTS_FUZZ_EDGE_NUMBERS_H_

#include <cstdint>

namespace gradsync::fuzz {

inline constexpr std::uint64_t kEdgeNumbers[] = {0,
                                                 1,
                                                 2,
                                                 127,
                                                 128,
                                                 0x7fffffff,
                                                 0x80000000,
                                                 0xffffffff,
                                                 0x100000000,
                                                 0x7fffffffffffffff,
                                                 0x8000000000000000,
                                                 0xffffffffffffffff};

}  // namespace gradsync::fuzz

#endif  // TESTS_FUZZ_EDGE_NUMBERS_H_
