// A PeerWatch on socket pairs. The test has the other ends.

#include "daemon/engine/peer_watch.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/engine/engine_errors.h"
#include "tests/engine/event.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kLanes = 2;
// A silence limit for tests that wait for it. Even a busy machine delays no thread by as much.
constexpr std::uint64_t kShortNs = 2'000'000'000;

std::string NodeOf(const absl::Status& status) {
  for (const auto& [key, value] : DetailsOf(status).fields) {
    if (key == "node") return value;
  }
  return "";
}

// Node 0 watches nodes 1 and 2.
class PeerWatchTest : public testing::Test {
 protected:
  PeerWatchTest() : progress_(kLanes) {}

  void Start(absl::Duration silence_limit) {
    std::vector<PeerStream> theirs(3);
    for (std::size_t node = 1; node < 3; ++node) {
      int ends[2];
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
      theirs[node] = PeerStream(UniqueFd(ends[0]), nullptr, PeerStream::Role::kConnects);
      peers_[node] = UniqueFd(ends[1]);
    }
    PeerWatch::Options options;
    options.node_names = {"a", "b", "c"};
    options.silence_limit = silence_limit;
    options.on_failure = [this](const absl::Status& why) {
      ++failures_;
      failure_.Set(why);
    };
    watch_ = std::make_unique<PeerWatch>(std::move(options), std::move(theirs), &progress_);
  }

  void Tell(std::size_t peer, const WatchFrame& frame) {
    const std::string bytes = EncodeWatchFrame(frame);
    ASSERT_EQ(send(peers_[peer].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void TellAlive(std::size_t peer, std::vector<std::uint64_t> begun = {0, 0}) {
    WatchFrame frame;
    frame.begun = std::move(begun);
    Tell(peer, frame);
  }
  void TellLeft(std::size_t peer, std::vector<std::uint64_t> begun) {
    WatchFrame frame;
    frame.kind = WatchFrame::Kind::kLeft;
    frame.begun = std::move(begun);
    Tell(peer, frame);
  }

  // The next frame from the watch. Nullopt when the connection has ended.
  std::optional<WatchFrame> Hear(std::size_t peer) {
    for (;;) {
      absl::string_view rest = heard_[peer];
      WatchFrame frame;
      const absl::StatusOr<bool> taken = DecodeWatchFrame(&rest, kLanes, &frame);
      if (taken.ok() && *taken) {
        heard_[peer] = std::string(rest);
        return frame;
      }
      pollfd readable = {peers_[peer].get(), POLLIN, 0};
      if (poll(&readable, 1, 60'000) != 1) return std::nullopt;
      char bytes[1024];
      const ssize_t got = recv(peers_[peer].get(), bytes, sizeof(bytes), 0);
      if (got <= 0) return std::nullopt;
      heard_[peer].append(bytes, static_cast<std::size_t>(got));
    }
  }

  std::vector<LaneProgress> progress_;
  Event failure_;
  std::atomic<int> failures_{0};
  UniqueFd peers_[3];
  std::string heard_[3];
  std::unique_ptr<PeerWatch> watch_;
};

TEST_F(PeerWatchTest, SendsItsProgressPeriodically) {
  progress_[1].begun = 5;
  Start(absl::Seconds(1));
  for (int i = 0; i < 3; ++i) {
    const auto frame = Hear(1);
    ASSERT_TRUE(frame.has_value());
    EXPECT_EQ(frame->kind, WatchFrame::Kind::kAlive);
    EXPECT_EQ(frame->begun, (std::vector<std::uint64_t>{0, 5}));
  }
}

TEST_F(PeerWatchTest, ClosedConnectionIsALostNodeOnEveryNode) {
  Start(absl::Minutes(10));
  peers_[2].reset();
  const auto failure = failure_.Wait();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(DetailsOf(*failure).reason, "ENGINE_PEER_LOST");
  EXPECT_EQ(NodeOf(*failure), "c");
  for (;;) {
    const auto frame = Hear(1);
    ASSERT_TRUE(frame.has_value());
    if (frame->kind == WatchFrame::Kind::kAlive) continue;
    EXPECT_EQ(frame->kind, WatchFrame::Kind::kFailed);
    EXPECT_EQ(frame->failure, *failure);
    break;
  }
  peers_[1].reset();
  watch_.reset();
  EXPECT_EQ(failures_, 1);
}

TEST_F(PeerWatchTest, SilentNodeTimesOutAndIsNamed) {
  Start(absl::Nanoseconds(kShortNs));
  const std::uint64_t start_ns = MonotonicNowNs();
  TellAlive(1);
  TellAlive(2);
  // Node 1 keeps sending.
  while (!failure_.Wait(std::chrono::milliseconds(20)).has_value()) TellAlive(1);
  const std::uint64_t took_ns = MonotonicNowNs() - start_ns;
  const absl::Status failure = *failure_.Wait();
  EXPECT_EQ(failure.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(DetailsOf(failure).reason, "ENGINE_TIMEOUT");
  EXPECT_EQ(NodeOf(failure), "c");
  EXPECT_GE(took_ns, kShortNs);
}

TEST_F(PeerWatchTest, SilenceCountsFromTheFirstMessage) {
  Start(absl::Milliseconds(100));
  EXPECT_FALSE(failure_.Wait(std::chrono::milliseconds(400)).has_value());
}

TEST_F(PeerWatchTest, FailureReportedByAnotherNodeIsReportedToo) {
  Start(absl::Minutes(10));
  WatchFrame frame;
  frame.kind = WatchFrame::Kind::kFailed;
  frame.failure = PeerLost("c", "its connection was closed");
  Tell(1, frame);
  const auto failure = failure_.Wait();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(*failure, frame.failure);
}

TEST_F(PeerWatchTest, NodeThatEndsWithExchangesPendingIsLost) {
  Start(absl::Minutes(10));
  WatchFrame frame;
  frame.kind = WatchFrame::Kind::kFailed;
  frame.failure = EngineEnded();
  Tell(1, frame);
  const auto failure = failure_.Wait();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(DetailsOf(*failure).reason, "ENGINE_PEER_LOST");
  EXPECT_EQ(NodeOf(*failure), "b");
}

TEST_F(PeerWatchTest, NodeThatHasLeftFailsOnlyLaterChunks) {
  progress_[0].begun = 3;
  progress_[1].begun = 2;
  Start(absl::Minutes(10));
  TellLeft(1, {3, 2});
  peers_[1].reset();
  TellAlive(2, {3, 2});
  // After these frames the watch has read what both nodes sent.
  for (int i = 0; i < 5; ++i) {
    TellAlive(2, {3, 2});
    ASSERT_TRUE(Hear(2).has_value());
  }
  EXPECT_EQ(failures_, 0);
  progress_[1].begun = 3;
  while (!failure_.Wait(std::chrono::milliseconds(20)).has_value()) TellAlive(2, {3, 3});
  const absl::Status failure = *failure_.Wait();
  EXPECT_EQ(DetailsOf(failure).reason, "ENGINE_PEER_LOST");
  EXPECT_EQ(NodeOf(failure), "b");
}

TEST_F(PeerWatchTest, SuspectedFailureNamesTheNodeThatHasLeft) {
  Start(absl::Minutes(10));
  TellLeft(2, {0, 0});
  watch_->Suspect(absl::UnavailableError("a connection broke"));
  const auto failure = failure_.Wait();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(NodeOf(*failure), "c");
}

TEST_F(PeerWatchTest, SuspectedFailureIsReportedIfNoNodeExplainsIt) {
  Start(absl::Minutes(10));
  const absl::Status why = absl::UnavailableError("a connection broke");
  watch_->Suspect(why);
  watch_->Suspect(absl::UnavailableError("another one"));
  const auto failure = failure_.Wait();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(*failure, why);
}

TEST_F(PeerWatchTest, MissingDataTimesOutAndASlowNodeDoesNot) {
  Start(absl::Nanoseconds(kShortNs));
  progress_[1].waiting = 4 * 7 + 1;
  // Node 2 has not begun chunk 7 of lane 1, since its trainers are slow.
  const std::uint64_t start_ns = MonotonicNowNs();
  while (MonotonicNowNs() - start_ns < kShortNs * 3 / 2) {
    TellAlive(1, {0, 8});
    TellAlive(2, {0, 7});
    ASSERT_FALSE(failure_.Wait(std::chrono::milliseconds(20)).has_value());
  }
  while (!failure_.Wait(std::chrono::milliseconds(20)).has_value()) {
    TellAlive(1, {0, 8});
    TellAlive(2, {0, 8});
  }
  const absl::Status failure = *failure_.Wait();
  EXPECT_EQ(DetailsOf(failure).reason, "ENGINE_TIMEOUT");
  EXPECT_EQ(NodeOf(failure), "b, c");
}

TEST_F(PeerWatchTest, MalformedFrameIsALostNode) {
  Start(absl::Minutes(10));
  const std::string bytes(100, '\xFF');
  ASSERT_EQ(send(peers_[1].get(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  const auto failure = failure_.Wait();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(NodeOf(*failure), "b");
}

TEST_F(PeerWatchTest, DestructorTellsTheOtherNodes) {
  Start(absl::Minutes(10));
  progress_[0].begun = 9;
  watch_.reset();
  for (;;) {
    const auto frame = Hear(1);
    ASSERT_TRUE(frame.has_value());
    if (frame->kind == WatchFrame::Kind::kAlive) continue;
    EXPECT_EQ(frame->kind, WatchFrame::Kind::kLeft);
    EXPECT_EQ(frame->begun[0], 9u);
    break;
  }
  EXPECT_EQ(failures_, 0);
}

}  // namespace
}  // namespace gradsync::daemon
