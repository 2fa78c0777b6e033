#include "daemon/base/header_frames.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/base/header_fields.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint8_t kData = 0, kHeaders = 1, kReset = 3, kContinuation = 9;
constexpr std::uint8_t kEnd = 4;
const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string Frame(std::uint8_t type, std::uint8_t flags, std::uint32_t stream,
                  const std::string& payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame += static_cast<char>(payload.size() >> shift);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift);
  return frame + payload;
}

// Its bytes look like frames of headers.
std::string Data(std::size_t size) { return std::string(size, '\x01'); }

// Headers of so many bytes, 200 at least: one field with a long value.
std::string Headers(std::size_t size) {
  const std::size_t rest = size - 6 - 127;  // of the length, in two more bytes
  return std::string("\x00\x01x\x7f", 4) + static_cast<char>(rest % 128 | 128) +
         static_cast<char>(rest / 128) + std::string(size - 6, 'v');
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
  std::string bytes = kPreface + Frame(4, 0, 0, Data(18));
  for (std::uint32_t stream = 1; stream < 2000; stream += 2) {
    bytes += Frame(kHeaders, kEnd, stream, Headers(300)) + Frame(kData, 0, stream, Data(16384)) +
             Frame(kData, 1, stream, "");
  }
  EXPECT_TRUE(Take(bytes));
}

TEST(HeaderFramesTest, ClientMayResetFewCallsAtATime) {
  HeaderFrames frames;
  const auto take = [&](const std::string& bytes) {
    return frames.Take(bytes.data(), bytes.size());
  };
  std::string resets;
  for (std::uint32_t i = 0; i < HeaderFrames::kMostResets; ++i) {
    resets += Frame(kReset, 0, 2 * i + 1, Data(4));
  }
  ASSERT_TRUE(take(kPreface + resets));
  EXPECT_TRUE(frames.counts());
  frames.ForgetResets();
  EXPECT_FALSE(frames.counts());
  EXPECT_TRUE(take(resets));
  EXPECT_FALSE(take(Frame(kReset, 0, 1, Data(4))));
}

TEST(HeaderFramesTest, TooManyCallsAreRefused) {
  std::string bytes = kPreface;
  for (const std::uint32_t stream : {1u, 3u}) {
    bytes += Frame(kHeaders, 0, stream, "") + Frame(kContinuation, kEnd, stream, Headers(300)) +
             Frame(kReset, 0, stream, Data(4));
  }
  const std::string third = Frame(kHeaders, kEnd, 5, Headers(300));
  HeaderFrames frames(/*most_calls=*/2);
  EXPECT_TRUE(frames.Take(bytes.data(), bytes.size()));
  EXPECT_FALSE(frames.Take(third.data(), third.size()));
  EXPECT_TRUE(Take(bytes + third)) << "any number";
}

// A server sends no preface, and headers twice for a call.
TEST(HeaderFramesTest, ServersHeadersAreLimitedPerConnection) {
  HeaderFrames frames = HeaderFrames::OfServer(/*most_calls=*/2);
  const auto take = [&](const std::string& bytes) {
    return frames.Take(bytes.data(), bytes.size());
  };
  EXPECT_TRUE(take(Frame(4, 0, 0, Data(18))));
  for (const std::uint32_t stream : {3u, 1u}) {
    EXPECT_TRUE(
        take(Frame(kHeaders, kEnd, stream, Headers(300)) + Frame(kData, 0, stream, Data(9))));
    EXPECT_TRUE(take(Frame(kHeaders, kEnd | 1, stream, Headers(300)))) << "trailers";
  }
  EXPECT_FALSE(take(Frame(kHeaders, kEnd, 1, Headers(300))));
}

// Sends `frame` as often as it may at once, and after a while; then once more.
void SendsFewAtATime(HeaderFrames frames, const std::string& frame, std::size_t no_data) {
  const auto sends = [&](std::size_t bytes) {
    for (std::size_t i = 0; i < bytes / no_data; ++i) {
      ASSERT_TRUE(frames.Take(frame.data(), frame.size())) << i;
    }
  };
  sends(frames.most_besides());
  EXPECT_TRUE(frames.counts());
  frames.Regain(/*ns=*/10'000'000);
  sends(HeaderFrames::kRegainedBesides / 100);
  EXPECT_FALSE(frames.Take(frame.data(), frame.size()) && frames.Take(frame.data(), frame.size()));
  frames.Regain(/*ns=*/1'000'000'000);
  EXPECT_FALSE(frames.counts());
}

TEST(HeaderFramesTest, EachSideMaySendFewBytesAtATimeThatAreNoData) {
  HeaderFrames trainer, node(/*most_calls=*/2);
  ASSERT_TRUE(trainer.Take(kPreface.data(), kPreface.size()));
  ASSERT_TRUE(node.Take(kPreface.data(), kPreface.size()));
  constexpr std::size_t kFrame = 9;
  for (const HeaderFrames& side : {trainer, node, HeaderFrames::OfServer(/*most_calls=*/2)}) {
    SendsFewAtATime(side, Frame(6, 0, 0, Data(8)), kFrame + 8);  // a ping
    SendsFewAtATime(side, Frame(kContinuation, 0, 1, ""), kFrame);
    SendsFewAtATime(side, Frame(kData, 1, 1, ""), kFrame);
    SendsFewAtATime(side, Frame(kData, 0, 1, Data(5)), kFrame);
  }
}

TEST(HeaderFramesTest, MuchDataPasses) {
  HeaderFrames client;
  ASSERT_TRUE(client.Take(kPreface.data(), kPreface.size()));
  const std::string data = Frame(kData, 0, 1, Data(16384));
  for (int i = 0; i < 5'000; ++i) ASSERT_TRUE(client.Take(data.data(), data.size()));
}

TEST(HeaderFramesTest, ServersHeadersMustEnd) {
  HeaderFrames frames = HeaderFrames::OfServer(/*most_calls=*/2);
  const std::string begun = Frame(kHeaders, 0, 1, Headers(300));
  EXPECT_TRUE(frames.Take(begun.data(), begun.size()));
  const std::string more = Frame(kContinuation, 0, 1, Headers(HeaderFrames::kMostBytes));
  EXPECT_FALSE(frames.Take(more.data(), more.size()));
}

TEST(HeaderFramesTest, HeadersMayBeInSeveralFrames) {
  const std::string headers = Headers(HeaderFrames::kMostBytes);
  const std::string bytes =
      kPreface + Frame(kHeaders, 0, 1, headers.substr(0, 3)) +
      Frame(kContinuation, 0, 1, headers.substr(3, 4000)) + Frame(kContinuation, 0, 1, "") +
      Frame(kContinuation, kEnd, 1, headers.substr(4003)) + Frame(kHeaders, kEnd, 3, headers);
  for (std::size_t piece = 1; piece < 40; ++piece) EXPECT_TRUE(Take(bytes, piece)) << piece;
}

TEST(HeaderFramesTest, LongHeadersAreRefusedHoweverTheyCome) {
  const std::string headers = Headers(HeaderFrames::kMostBytes + 1);
  const std::string one = kPreface + Frame(kHeaders, kEnd, 1, headers);
  const std::string several = kPreface + Frame(kHeaders, 0, 1, headers.substr(1)) +
                              Frame(kContinuation, kEnd, 1, headers.substr(0, 1));
  for (std::size_t piece = 1; piece < 40; ++piece) {
    EXPECT_FALSE(Take(one, piece)) << piece;
    EXPECT_FALSE(Take(several, piece)) << piece;
  }
}

TEST(HeaderFramesTest, LongHeadersAreRefusedBeforeTheyCome) {
  const std::string bytes =
      kPreface + Frame(kHeaders, kEnd, 1, Headers(HeaderFrames::kMostBytes + 1));
  EXPECT_FALSE(Take(bytes.substr(0, kPreface.size() + 9)));
}

TEST(HeaderFramesTest, TrailersAreRefused) {
  const std::string call =
      kPreface + Frame(kHeaders, kEnd, 3, Headers(200)) + Frame(kData, 0, 3, Data(10));
  EXPECT_TRUE(Take(call));
  EXPECT_FALSE(Take(call + Frame(kHeaders, kEnd | 1, 3, "\x82")));
  EXPECT_FALSE(Take(call + Frame(kHeaders, kEnd, 5, "\x82") + Frame(kHeaders, kEnd, 3, "\x82")));
}

TEST(HeaderFramesTest, ManyFieldsAreRefusedAlsoInSeveralFrames) {
  const std::string half(HeaderFields::kMostFields / 2, '\x82');
  const std::string most =
      kPreface + Frame(kHeaders, 0, 1, half) + Frame(kContinuation, 0, 1, half);
  EXPECT_TRUE(Take(most + Frame(kContinuation, kEnd, 1, "") + Frame(kHeaders, kEnd, 3, half)));
  EXPECT_FALSE(Take(most + Frame(kContinuation, kEnd, 1, "\x82")));
}

TEST(HeaderFramesTest, APriorityIsNoField) {
  const std::string priority(5, '\x7f');  // as a field, it would be a number without an end
  EXPECT_TRUE(Take(kPreface + Frame(kHeaders, kEnd | 0x20, 1, priority + Headers(200))));
  EXPECT_TRUE(Take(kPreface + Frame(kHeaders, 0x20, 1, priority.substr(0, 2)) +
                   Frame(kContinuation, kEnd, 1, priority.substr(2) + Headers(200))));
}

TEST(HeaderFramesTest, UnfinishedHeadersAreCounted) {
  HeaderFrames frames;
  const auto take = [&](const std::string& bytes) {
    EXPECT_TRUE(frames.Take(bytes.data(), bytes.size()));
    return frames.unfinished();
  };
  EXPECT_EQ(take(kPreface), 0u);
  EXPECT_EQ(take(Frame(kHeaders, 0, 1, Headers(300).substr(0, 100))), 100u);
  EXPECT_EQ(take(Frame(kContinuation, 0, 1, std::string(50, 'v'))), 150u);
  EXPECT_EQ(take(Frame(kContinuation, kEnd, 1, std::string(150, 'v'))), 0u);
  EXPECT_EQ(take(Frame(kData, 0, 1, Data(50))), 0u);
}

}  // namespace
}  // namespace gradsync::daemon
