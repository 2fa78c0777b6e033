// Makes values out of a fuzzer's bytes.

#ifndef TESTS_FUZZ_BYTE_READER_H_
#define TESTS_FUZZ_BYTE_READER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "tests/fuzz/edge_numbers.h"

namespace gradsync::fuzz {

// Reads from the front; behind the end everything is 0. Thread-compatible. The bytes outlive this.
class ByteReader {
 public:
  ByteReader(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  const std::uint8_t* data() const { return data_; }
  std::size_t left() const { return left_; }

  std::uint8_t Byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  bool Bool() { return Byte() % 2 == 1; }
  // Less than `bound`, which is at most 256.
  std::uint32_t Below(std::uint32_t bound) { return Byte() % bound; }

  // Mostly `near` or a neighbour of it, sometimes a small number or the end of a range.
  std::uint64_t Number(std::uint64_t near) {
    const std::uint8_t choice = Byte();
    if (choice < 160) return near;
    if (choice < 192) return near + 1;
    if (choice < 208) return near - 1;
    if (choice < 232) return choice - 208u;
    return kEdgeNumbers[choice % std::size(kEdgeNumbers)];
  }

  // At most `most` bytes.
  std::string Bytes(std::size_t most) {
    const std::size_t size = std::min(most, left_);
    std::string bytes(reinterpret_cast<const char*>(data_), size);
    data_ += size;
    left_ -= size;
    return bytes;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace gradsync::fuzz

#endif  // TESTS_FUZZ_BYTE_READER_H_
