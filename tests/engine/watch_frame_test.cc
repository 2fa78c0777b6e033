#include "daemon/engine/watch_frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

WatchFrame Alive(std::vector<std::uint64_t> begun) {
  WatchFrame frame;
  frame.begun = std::move(begun);
  return frame;
}

TEST(WatchFrame, DecodesWhatWasEncoded) {
  WatchFrame failed;
  failed.kind = WatchFrame::Kind::kFailed;
  failed.failure = MakeError(absl::StatusCode::kAborted, reason::kRankLost, "rank 1 is lost",
                             {{field::kNode, "host-7"}});
  WatchFrame left = Alive({7, 8});
  left.kind = WatchFrame::Kind::kLeft;
  const std::string bytes =
      EncodeWatchFrame(Alive({1, ~0ull})) + EncodeWatchFrame(failed) + EncodeWatchFrame(left);
  absl::string_view rest = bytes;
  WatchFrame frame;
  ASSERT_EQ(DecodeWatchFrame(&rest, 2, &frame).value(), true);
  EXPECT_EQ(frame.kind, WatchFrame::Kind::kAlive);
  EXPECT_EQ(frame.begun, (std::vector<std::uint64_t>{1, ~0ull}));
  ASSERT_EQ(DecodeWatchFrame(&rest, 2, &frame).value(), true);
  EXPECT_EQ(frame.kind, WatchFrame::Kind::kFailed);
  EXPECT_EQ(frame.failure, failed.failure);
  EXPECT_EQ(DetailsOf(frame.failure).reason, "RANK_LOST");
  ASSERT_EQ(DecodeWatchFrame(&rest, 2, &frame).value(), true);
  EXPECT_EQ(frame.kind, WatchFrame::Kind::kLeft);
  EXPECT_EQ(frame.begun, (std::vector<std::uint64_t>{7, 8}));
  EXPECT_EQ(DecodeWatchFrame(&rest, 2, &frame).value(), false);
}

TEST(WatchFrame, WaitsForTheRestOfItsBytes) {
  const std::string bytes = EncodeWatchFrame(Alive({1, 2, 3}));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    absl::string_view part = absl::string_view(bytes).substr(0, size);
    WatchFrame frame;
    ASSERT_EQ(DecodeWatchFrame(&part, 3, &frame).value(), false) << size;
    EXPECT_EQ(part.size(), size);
  }
}

TEST(WatchFrame, LongTextsAreCutToFit) {
  WatchFrame failed;
  failed.kind = WatchFrame::Kind::kFailed;
  failed.failure = MakeError(absl::StatusCode::kInternal, Reason(std::string(5000, 'r')),
                             std::string(5000, 'm'), {{field::kNode, std::string(5000, 'n')}});
  const std::string bytes = EncodeWatchFrame(failed);
  EXPECT_LE(bytes.size(), kMaxWatchFrameBytes);
  absl::string_view rest = bytes;
  WatchFrame frame;
  ASSERT_EQ(DecodeWatchFrame(&rest, 1, &frame).value(), true);
  EXPECT_EQ(frame.failure.message(), std::string(1024, 'm'));
}

// The engine and its daemon tell each other about the failure in strings of Protocol Buffers.
TEST(WatchFrame, TextsOfAnotherNodeAreMadeValid) {
  WatchFrame failed;
  failed.kind = WatchFrame::Kind::kFailed;
  failed.failure =
      MakeError(absl::StatusCode::kInternal, Reason("R#1"), "m#", {{field::kNode, "n#"}});
  std::string bytes = EncodeWatchFrame(failed);
  std::replace(bytes.begin(), bytes.end(), '#', '\xff');
  absl::string_view rest = bytes;
  WatchFrame frame;
  ASSERT_EQ(DecodeWatchFrame(&rest, 1, &frame).value(), true);
  EXPECT_EQ(frame.failure.message(), "m?");
  EXPECT_EQ(DetailsOf(frame.failure).reason, "R?1");
  EXPECT_EQ(DetailsOf(frame.failure).Value(field::kNode), "n?");
}

TEST(WatchFrame, ALongTextIsCutBetweenCharacters) {
  WatchFrame failed;
  failed.kind = WatchFrame::Kind::kFailed;
  failed.failure = absl::InternalError(std::string(1023, 'm') + "\u00e4");
  const std::string bytes = EncodeWatchFrame(failed);
  absl::string_view rest = bytes;
  WatchFrame frame;
  ASSERT_EQ(DecodeWatchFrame(&rest, 1, &frame).value(), true);
  EXPECT_EQ(frame.failure.message(), std::string(1023, 'm'));
}

TEST(WatchFrame, RefusesMalformedFrames) {
  WatchFrame failed;
  failed.kind = WatchFrame::Kind::kFailed;
  failed.failure = absl::InternalError("x");
  const std::string good = EncodeWatchFrame(failed);
  std::string code = good, text = good, kind = good, length = good, huge = good;
  code[8] = 17;
  text[12] = 100;
  kind[4] = 9;
  length[0] = 3;
  huge[2] = 1;
  for (const std::string& bytes :
       {code, text, kind, length, huge, EncodeWatchFrame(Alive({1, 2}))}) {
    absl::string_view rest = bytes;
    WatchFrame frame;
    EXPECT_EQ(DecodeWatchFrame(&rest, 1, &frame).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace gradsync::daemon
