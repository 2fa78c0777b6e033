// LaneLinks on socket pairs: two lanes that talk, and a lane whose other side misbehaves.

#include "daemon/engine/lane_links.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

std::vector<std::byte> Pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 31 + seed);
  return data;
}

PeerStream Stream(int fd) { return PeerStream(UniqueFd(fd), nullptr, PeerStream::Role::kConnects); }

std::array<int, 2> Pair() {
  std::array<int, 2> ends{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
  return ends;
}

// Node 0's links to node 1, whose end the test has.
class LaneLinksTest : public testing::Test {
 protected:
  LaneLinksTest() {
    const auto ends = Pair();
    std::vector<PeerStream> peers(2);
    peers[1] = Stream(ends[0]);
    other_ = UniqueFd(ends[1]);
    links_ = std::make_unique<LaneLinks>(std::move(peers), std::vector<std::string>{"a", "b"});
  }

  void Tell(std::uint64_t number, std::uint64_t bytes, const std::string& data) {
    std::string message(16, '\0');
    std::memcpy(message.data(), &number, 8);
    std::memcpy(message.data() + 8, &bytes, 8);
    message += data;
    ASSERT_EQ(send(other_.get(), message.data(), message.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(message.size()));
  }

  UniqueFd other_;
  std::unique_ptr<LaneLinks> links_;
};

TEST(LaneLinks, MessagesArriveInOrderAndWhole) {
  const auto ends = Pair();
  std::vector<PeerStream> of_a(2), of_b(2);
  of_a[1] = Stream(ends[0]);
  of_b[0] = Stream(ends[1]);
  const std::vector<std::string> names = {"a", "b"};
  LaneLinks a(std::move(of_a), names), b(std::move(of_b), names);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{17}, std::size_t{5'000'000}}) {
    const auto first = Pattern(bytes, 1), second = Pattern(bytes + 1, 2);
    std::vector<std::byte> heard_first(bytes), heard_second(bytes + 1), back(bytes);
    LaneLinks::Group sent, received, answered;
    // The messages are there before their memory is.
    a.Send(1, &sent, first.data(), bytes);
    a.Send(1, &sent, second.data(), bytes + 1);
    a.Receive(1, &answered, back.data(), bytes);
    a.Start();
    b.Receive(0, &received, heard_first.data(), bytes);
    b.Receive(0, &received, heard_second.data(), bytes + 1);
    b.Send(0, &received, first.data(), bytes);
    b.Start();
    EXPECT_EQ(b.Await(&received), absl::OkStatus());
    EXPECT_EQ(a.Await(&sent), absl::OkStatus());
    EXPECT_EQ(a.Await(&answered), absl::OkStatus());
    EXPECT_EQ(heard_first, first);
    EXPECT_EQ(heard_second, second);
    EXPECT_EQ(back, first);
  }
}

TEST_F(LaneLinksTest, MessageThatIsNotExpectedBreaksTheConnection) {
  const std::vector<std::pair<std::uint64_t, std::uint64_t>> wrong = {
      {0, 4}, {2, 4}, {1, 3}, {1, 5}, {1, ~std::uint64_t{0}}};
  for (const auto& [number, bytes] : wrong) {
    const auto ends = Pair();
    std::vector<PeerStream> peers(2);
    peers[1] = Stream(ends[0]);
    other_ = UniqueFd(ends[1]);
    links_ = std::make_unique<LaneLinks>(std::move(peers), std::vector<std::string>{"a", "b"});
    std::vector<std::byte> data(4);
    LaneLinks::Group group;
    links_->Receive(1, &group, data.data(), 4);
    links_->Start();
    Tell(number, bytes, "data");
    const absl::Status status = links_->Await(&group);
    EXPECT_EQ(DetailsOf(status).reason, "ENGINE_BROKEN") << status;
    EXPECT_EQ(DetailsOf(status).Value(field::kNode), "b") << status;
    EXPECT_EQ(data, std::vector<std::byte>(4)) << "the data is not taken";
  }
}

TEST_F(LaneLinksTest, LostConnectionNamesTheNode) {
  std::vector<std::byte> data(4);
  LaneLinks::Group group;
  links_->Receive(1, &group, data.data(), 4);
  links_->Start();
  Tell(1, 4, "da");
  other_.reset();
  const absl::Status status = links_->Await(&group);
  EXPECT_EQ(DetailsOf(status).reason, "ENGINE_PEER_LOST") << status;
  EXPECT_EQ(DetailsOf(status).Value(field::kNode), "b") << status;
  LaneLinks::Group later;
  links_->Send(1, &later, data.data(), 4);
  links_->Start();
  EXPECT_EQ(links_->Await(&later), status);
}

TEST_F(LaneLinksTest, NodeThatHasLeftIsNoErrorUntilItIsNeeded) {
  std::vector<std::byte> data(4);
  LaneLinks::Group group;
  links_->Receive(1, &group, data.data(), 4);
  links_->Start();
  Tell(1, 4, "data");
  other_.reset();
  EXPECT_EQ(links_->Await(&group), absl::OkStatus());
  LaneLinks::Group later;
  links_->Receive(1, &later, data.data(), 4);
  links_->Start();
  EXPECT_EQ(DetailsOf(links_->Await(&later)).reason, "ENGINE_PEER_LOST");
}

TEST_F(LaneLinksTest, AbortEndsAllWaits) {
  std::vector<std::byte> data(4);
  LaneLinks::Group group;
  links_->Receive(1, &group, data.data(), 4);
  links_->Start();
  std::thread aborts([&] { links_->Abort(); });
  EXPECT_TRUE(absl::IsCancelled(links_->Await(&group)));
  aborts.join();
  EXPECT_TRUE(absl::IsCancelled(links_->Await(&group)));
}

}  // namespace
}  // namespace gradsync::daemon
