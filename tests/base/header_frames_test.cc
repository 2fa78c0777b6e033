#include "daemon/base/header_frames.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace gradsync::daemon {
namespace {

constexpr std::uint8_t kData = 0, kHeaders = 1, kReset = 3, kContinuation = 9;
constexpr std::uint8_t kEnd = 4;
const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string Frame(std::uint8_t type, std::uint8_t flags, std::uint32_t stream, std::size_t size) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame += static_cast<char>(size >> shift);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift);
  return frame + std::string(size, '\x01');  // its bytes look like frames of headers
}

bool Take(const std::string& bytes, std::size_t piece = SIZE_MAX) {
  HeaderFrames frames;
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    if (!frames.Take(bytes.data() + at, std::min(piece, bytes.size() - at))) return false;
    if (piece > bytes.size()) break;
  }
  return true;
}

TEST(HeaderFramesTest, CallsAndTheirMessagesPass) {
  std::string bytes = kPreface + Frame(4, 0, 0, 18);
  for (std::uint32_t stream = 1; stream < 2000; stream += 2) {
    bytes += Frame(kHeaders, kEnd, stream, 300) + Frame(kData, 0, stream, 16384) +
             Frame(kData, 1, stream, 0) + Frame(kReset, 0, stream, 4);
  }
  EXPECT_TRUE(Take(bytes));
}

TEST(HeaderFramesTest, HeadersMayBeInSeveralFrames) {
  const std::string bytes = kPreface + Frame(kHeaders, 0, 1, 4096) +
                            Frame(kContinuation, 0, 1, 4000) + Frame(kContinuation, kEnd, 1, 96) +
                            Frame(kHeaders, kEnd, 3, HeaderFrames::kMostBytes);
  for (std::size_t piece = 1; piece < 40; ++piece) EXPECT_TRUE(Take(bytes, piece)) << piece;
}

TEST(HeaderFramesTest, LongHeadersAreRefusedHoweverTheyCome) {
  const std::string one = kPreface + Frame(kHeaders, kEnd, 1, HeaderFrames::kMostBytes + 1);
  const std::string several =
      kPreface + Frame(kHeaders, 0, 1, HeaderFrames::kMostBytes) + Frame(kContinuation, kEnd, 1, 1);
  for (std::size_t piece = 1; piece < 40; ++piece) {
    EXPECT_FALSE(Take(one, piece)) << piece;
    EXPECT_FALSE(Take(several, piece)) << piece;
  }
}

TEST(HeaderFramesTest, LongHeadersAreRefusedBeforeTheyCome) {
  const std::string bytes = kPreface + Frame(kHeaders, kEnd, 1, HeaderFrames::kMostBytes + 1);
  EXPECT_FALSE(Take(bytes.substr(0, kPreface.size() + 9)));
}

TEST(HeaderFramesTest, TrailersAreRefused) {
  const std::string call = kPreface + Frame(kHeaders, kEnd, 3, 100) + Frame(kData, 0, 3, 10);
  EXPECT_TRUE(Take(call));
  EXPECT_FALSE(Take(call + Frame(kHeaders, kEnd | 1, 3, 10)));
  EXPECT_FALSE(Take(call + Frame(kHeaders, kEnd, 5, 10) + Frame(kHeaders, kEnd, 3, 10)));
}

TEST(HeaderFramesTest, UnfinishedHeadersAreCounted) {
  HeaderFrames frames;
  const auto take = [&](const std::string& bytes) {
    EXPECT_TRUE(frames.Take(bytes.data(), bytes.size()));
    return frames.unfinished();
  };
  EXPECT_EQ(take(kPreface), 0u);
  EXPECT_EQ(take(Frame(kHeaders, 0, 1, 100)), 100u);
  EXPECT_EQ(take(Frame(kContinuation, 0, 1, 50)), 150u);
  EXPECT_EQ(take(Frame(kContinuation, kEnd, 1, 50)), 0u);
  EXPECT_EQ(take(Frame(kData, 0, 1, 50)), 0u);
}

}  // namespace
}  // namespace gradsync::daemon
