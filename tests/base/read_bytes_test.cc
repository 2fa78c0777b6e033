#include "daemon/base/read_bytes.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "daemon/base/header_frames.h"
#include "daemon/base/unique_fd.h"
#include "tests/kit/deadline.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;
constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// A connection whose headers, calls and resets are limited, and its client.
class LimitedConnection {
 public:
  LimitedConnection() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    ours_ = UniqueFd(ends[0]);
    theirs_ = UniqueFd(ends[1]);
    struct stat named {};
    EXPECT_EQ(fstat(ours_.get(), &named), 0);
    socket_ = named.st_ino;
    LimitHeaders(ours_.get(), socket_, HeaderFrames());
  }

  // The client sends these bytes. Returns whether they can be read; else the read says that the
  // connection has ended.
  bool Brings(const std::string& sent) {
    EXPECT_EQ(send(theirs_.get(), sent.data(), sent.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(sent.size()));
    std::string read(sent.size(), '\0');
    iovec part{read.data(), read.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const ssize_t bytes = recvmsg(ours_.get(), &message, MSG_DONTWAIT);
    EXPECT_TRUE(bytes == 0 || bytes == static_cast<ssize_t>(sent.size())) << bytes;
    return bytes > 0;
  }
  bool refused() const { return HeadersOf(ours_.get(), socket_).refused; }

 private:
  UniqueFd ours_, theirs_;
  ino_t socket_ = 0;
};

// Frames that reset so many calls: RST_STREAM, with CANCEL.
std::string Resets(std::uint32_t count) {
  const std::string frame({0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8});
  std::string frames;
  for (std::uint32_t i = 0; i < count; ++i) frames += frame;
  return frames;
}

TEST(ReadBytesTest, ResetsAreCountedAnewEverySecond) {
  const auto attempt = [] {
    LimitedConnection connection;
    const std::uint64_t first_ns = NowNs();
    EXPECT_TRUE(connection.Brings(kPreface + Resets(HeaderFrames::kMostResets)));
    EXPECT_TRUE(Soon([&] { return NowNs() > first_ns + kSecondNs; }));
    const std::uint64_t second_ns = NowNs();
    EXPECT_TRUE(connection.Brings(Resets(HeaderFrames::kMostResets)));
    EXPECT_FALSE(connection.refused());
    const bool more = connection.Brings(Resets(1));
    // On a busy machine the next second may have begun. Then this says nothing.
    if (NowNs() >= second_ns + kSecondNs) return false;
    EXPECT_FALSE(more) << "it is one too many in a second";
    EXPECT_TRUE(connection.refused());
    return true;
  };
  EXPECT_TRUE(Soon(attempt));
}

TEST(ReadBytesTest, BytesThatAreNoDataAreRegained) {
  LimitedConnection connection;
  const std::string ping({0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8});
  std::string pings;
  while (2 * (pings.size() + ping.size()) <= HeaderFrames::kMostBesidesOfTrainer) pings += ping;
  EXPECT_TRUE(connection.Brings(kPreface));
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(connection.Brings(pings));
    EXPECT_TRUE(connection.Brings(pings));
    const std::uint64_t brought_ns = NowNs();
    EXPECT_TRUE(Soon([&] { return NowNs() > brought_ns + kSecondNs / 8; }));
  }
  EXPECT_FALSE(connection.refused());
  EXPECT_TRUE(Soon([&] { return !connection.Brings(pings); })) << "without a pause";
  EXPECT_TRUE(connection.refused());
}

}  // namespace
}  // namespace gradsync::daemon
