#include "daemon/base/header_fields.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace gradsync::daemon {
namespace {

// RFC 7541. A number in a byte whose upper bits are `kind`.
std::string Number(std::uint8_t kind, int bits, std::uint32_t value) {
  const std::uint32_t most = (1u << bits) - 1;
  if (value < most) return std::string(1, static_cast<char>(kind | value));
  std::string text(1, static_cast<char>(kind | most));
  for (value -= most; value >= 128; value >>= 7) text += static_cast<char>(value % 128 | 128);
  return text + static_cast<char>(value);
}
std::string Text(std::size_t size, bool huffman = false) {
  return Number(huffman ? 0x80 : 0, 7, static_cast<std::uint32_t>(size)) + std::string(size, 'v');
}
// Fields with a new name and a value of so many bytes, which the table keeps or not.
std::string Kept(std::size_t size) { return '\x40' + Text(1) + Text(size); }
std::string NotKept(std::size_t size) { return std::string(1, 0) + Text(1) + Text(size); }
std::string Named(std::uint32_t entry) { return Number(0x80, 7, entry); }

bool Take(HeaderFields* fields, const std::string& bytes, std::size_t piece = SIZE_MAX) {
  fields->Begin();
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t size = piece < bytes.size() - at ? piece : bytes.size() - at;
    if (!fields->Take(bytes.data() + at, size)) return false;
    at += size;
  }
  return true;
}
bool Take(const std::string& bytes) {
  HeaderFields fields;
  return Take(&fields, bytes);
}

std::string Times(int count, const std::string& bytes) {
  std::string all;
  for (int i = 0; i < count; ++i) all += bytes;
  return all;
}

TEST(HeaderFieldsTest, AnHonestCallPasses) {
  // As gRPC's clients send them: the first call, and the next ones.
  HeaderFields fields;
  const std::string first =
      "\x86\x83" + Times(8, Kept(40)) + Number(0x40, 6, 63) + Text(30, true) + Kept(4000);
  const std::string next = "\x86\x83" + Times(10, Named(62)) + NotKept(2000);
  for (std::size_t piece = 1; piece < 20; ++piece) {
    EXPECT_TRUE(Take(&fields, first, piece)) << piece;
    for (int call = 0; call < 1000; ++call) EXPECT_TRUE(Take(&fields, next, piece)) << piece;
  }
}

TEST(HeaderFieldsTest, ManyFieldsAreRefused) {
  constexpr int kMost = HeaderFields::kMostFields;
  for (const std::string& field : {Named(2), NotKept(1), Kept(0), Number(0x10, 4, 20) + Text(3)}) {
    EXPECT_TRUE(Take(Times(kMost, field)));
    EXPECT_FALSE(Take(Times(kMost + 1, field)));
  }
}

TEST(HeaderFieldsTest, FieldsCountAnewForEachCall) {
  HeaderFields fields;
  for (int call = 0; call < 100; ++call) {
    EXPECT_TRUE(Take(&fields, Times(HeaderFields::kMostFields, Named(2))));
  }
}

// One byte names an entry of thousands of bytes, and gRPC may copy it.
TEST(HeaderFieldsTest, NamesOfALongEntryAreRefusedSoon) {
  EXPECT_TRUE(Take(Kept(3000) + Times(20, Named(62))));
  EXPECT_FALSE(Take(Kept(3000) + Times(40, Named(62))));
  EXPECT_TRUE(Take(Kept(3000) + Times(40, Named(61)))) << "not of this table";
}

TEST(HeaderFieldsTest, AnEntryOfAnEarlierCallCounts) {
  HeaderFields fields;
  EXPECT_TRUE(Take(&fields, Kept(3000)));
  EXPECT_FALSE(Take(&fields, Times(40, Named(70))));
  EXPECT_FALSE(Take(&fields, Times(40, Number(0, 4, 70) + Text(1)))) << "as a name";
}

TEST(HeaderFieldsTest, LongTextsAreRefused) {
  EXPECT_TRUE(Take(NotKept(90'000)));
  EXPECT_FALSE(Take(NotKept(100'000)));
  EXPECT_FALSE(Take(std::string(1, 0) + Text(1) + Text(70'000, /*huffman=*/true)))
      << "it is longer once it is decoded";
}

TEST(HeaderFieldsTest, NumbersWithoutAnEndAreRefused) {
  EXPECT_TRUE(Take("\x3f\xe1\x1f")) << "a table's size";
  EXPECT_FALSE(Take("\xff" + std::string(10, '\x80')));
  EXPECT_FALSE(Take(std::string("\x00\x7f", 2) + std::string(10, '\x80')));
}

}  // namespace
}  // namespace gradsync::daemon
