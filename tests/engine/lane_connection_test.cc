// A lane's connection on a socket pair. The other side is the test.

#include "daemon/engine/lane_connection.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

namespace gradsync::daemon {
namespace {

class LaneConnectionTest : public testing::Test {
 protected:
  LaneConnectionTest() {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
    other_ = UniqueFd(ends[1]);
    connection_ =
        LaneConnection(PeerStream(UniqueFd(ends[0]), nullptr, PeerStream::Role::kConnects));
  }

  static std::string Message(std::uint64_t number, const std::string& data) {
    const std::uint64_t header[2] = {number, data.size()};
    return std::string(reinterpret_cast<const char*>(header), sizeof(header)) + data;
  }
  void Say(const std::string& bytes) {
    ASSERT_EQ(send(other_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  absl::Status Move() { return connection_.Move(&done_); }

  std::array<std::byte, 4> first_{}, second_{};
  TransferGroup group_;
  std::vector<TransferGroup*> done_;
  UniqueFd other_;
  LaneConnection connection_;
};

TEST_F(LaneConnectionTest, MessageThatComesInPartsIsReceivedOnce) {
  connection_.Receive({&group_, first_.data(), 4});
  const std::string message = Message(1, "data");
  for (std::size_t i = 0; i < message.size(); ++i) {
    EXPECT_TRUE(done_.empty()) << i;
    EXPECT_EQ(connection_.events(), POLLIN);
    Say(message.substr(i, 1));
    ASSERT_EQ(Move(), absl::OkStatus()) << i;
  }
  EXPECT_EQ(done_, std::vector<TransferGroup*>{&group_});
  EXPECT_EQ(std::memcmp(first_.data(), "data", 4), 0);
  EXPECT_EQ(connection_.events(), 0);
}

TEST_F(LaneConnectionTest, MessageWaitsUntilItsMemoryIsNamed) {
  Say(Message(1, "data") + Message(2, "more"));
  ASSERT_EQ(Move(), absl::OkStatus());
  connection_.Receive({&group_, first_.data(), 4});
  ASSERT_EQ(Move(), absl::OkStatus());
  EXPECT_EQ(done_.size(), 1u);
  connection_.Receive({&group_, second_.data(), 4});
  ASSERT_EQ(Move(), absl::OkStatus());
  EXPECT_EQ(done_.size(), 2u);
  EXPECT_EQ(std::memcmp(second_.data(), "more", 4), 0);
}

TEST_F(LaneConnectionTest, SentMessagesHaveNumbersAndLengths) {
  std::memcpy(first_.data(), "data", 4);
  connection_.Send({&group_, first_.data(), 4});
  connection_.Send({&group_, first_.data(), 2});
  EXPECT_EQ(connection_.events(), POLLOUT);
  ASSERT_EQ(Move(), absl::OkStatus());
  EXPECT_EQ(done_.size(), 2u);
  char heard[100];
  const ssize_t bytes = recv(other_.get(), heard, sizeof(heard), 0);
  EXPECT_EQ(std::string(heard, static_cast<std::size_t>(bytes)),
            Message(1, "data") + Message(2, "da"));
}

TEST_F(LaneConnectionTest, OtherMessageThanTheExpectedOneIsNotTaken) {
  connection_.Receive({&group_, first_.data(), 4});
  Say(Message(1, "datum"));
  EXPECT_TRUE(absl::IsInternal(Move()));
  EXPECT_TRUE(done_.empty());
  EXPECT_EQ(first_, (std::array<std::byte, 4>{}));
}

TEST_F(LaneConnectionTest, EndIsAnErrorOnlyIfSomethingIsToBeMoved) {
  other_.reset();
  EXPECT_EQ(Move(), absl::OkStatus());
  connection_.Receive({&group_, first_.data(), 4});
  EXPECT_TRUE(absl::IsUnavailable(Move()));
}

}  // namespace
}  // namespace gradsync::daemon
