// Messages of a rank, made out of a fuzzer's bytes.

#ifndef TESTS_FUZZ_RANK_MESSAGES_H_
#define TESTS_FUZZ_RANK_MESSAGES_H_

#include <cstdint>
#include <string>

#include "gradsync/v1/gradsync.pb.h"
#include "tests/fuzz/byte_reader.h"

namespace gradsync::fuzz {

// What the ranks of a job have heard from the daemon. Without it the fuzzer would have to guess.
struct RankCounts {
  std::uint64_t step = 1;      // the next one
  std::uint64_t sequence = 1;  // of the next operation
};

// A layout of buckets of four float32, each of one parameter.
v1::SessionRequest LayoutMessage(const std::string& name, std::uint32_t buckets,
                                 std::uint32_t replaces);
v1::SessionRequest MappedMessage(std::uint32_t channel);

// Any message after OpenSession, mostly about what exists. `newest`: the rank's last channel.
v1::SessionRequest NextMessage(ByteReader* reader, std::uint32_t newest, RankCounts* counts);

}  // namespace gradsync::fuzz

#endif  // TESTS_FUZZ_RANK_MESSAGES_H_
