#include "daemon/base/borrowed_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "daemon/base/unique_fd.h"
#include "tests/kit/no_descriptors.h"

namespace gradsync::daemon {
namespace {

using Pair = std::pair<UniqueFd, UniqueFd>;

Pair UnixPair() {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

Pair TcpPair() {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(listener.get(), any, length), 0);
  EXPECT_EQ(listen(listener.get(), 1), 0);
  EXPECT_EQ(getsockname(listener.get(), any, &length), 0);
  UniqueFd theirs(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(theirs.get(), any, length), 0);
  UniqueFd ours(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return {std::move(ours), std::move(theirs)};
}

TEST(BorrowedTcpSocketTest, KnowsTheAddressOfItsSideUntilItIsClosed) {
  auto [ours, theirs] = TcpPair();
  const BorrowedSocket socket(ours.get());
  sockaddr_in theirs_peer{};
  socklen_t length = sizeof(theirs_peer);
  auto* const any = reinterpret_cast<sockaddr*>(&theirs_peer);
  ASSERT_EQ(getpeername(theirs.get(), any, &length), 0);
  const auto own = socket.OwnAddress();
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(reinterpret_cast<const sockaddr_in&>(*own).sin_port, theirs_peer.sin_port);
  ours = UniqueFd();
  EXPECT_FALSE(socket.OwnAddress().has_value());
}

TEST(BorrowedTcpSocketTest, CountsWhatTheOtherSideHasSent) {
  auto [ours, theirs] = TcpPair();
  const BorrowedSocket socket(ours.get());
  EXPECT_EQ(socket.ReceivedBytes(), 0u);
  ASSERT_EQ(write(theirs.get(), "12345", 5), 5);
  char bytes[5];
  ASSERT_EQ(recv(ours.get(), bytes, sizeof(bytes), MSG_WAITALL), 5);
  EXPECT_EQ(socket.ReceivedBytes(), 5u) << "also when it was read";
  ours = UniqueFd();
  EXPECT_EQ(socket.ReceivedBytes(), 0u);
}

class BorrowedSocketTest : public testing::TestWithParam<Pair (*)()> {};

TEST_P(BorrowedSocketTest, TheOwnerReadsNothingMoreAfterTheEnd) {
  const auto [ours, theirs] = GetParam()();
  const std::string sent(50'000, 'x');
  ASSERT_EQ(send(theirs.get(), sent.data(), sent.size(), 0), static_cast<ssize_t>(sent.size()));
  char byte = 0;
  ASSERT_EQ(recv(ours.get(), &byte, 1, 0), 1);
  const BorrowedSocket socket(ours.get());
  EXPECT_TRUE(socket.IsOpen());
  EXPECT_EQ(socket.UnreadBytes(), sent.size() - 1);
  EXPECT_TRUE(socket.End());
  EXPECT_EQ(recv(ours.get(), &byte, 1, MSG_DONTWAIT), 0);
  // The other side cannot send to the owner any more.
  send(theirs.get(), sent.data(), sent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  EXPECT_LE(recv(ours.get(), &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_TRUE(socket.IsOpen()) << "its owner closes it";
  EXPECT_TRUE(socket.End()) << "a second time";
}

TEST_P(BorrowedSocketTest, EndsAlsoWhenTheProcessHasNoFreeDescriptor) {
  auto [ours, theirs] = GetParam()();
  const auto [other, others_client] = GetParam()();
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const BorrowedSocket socket(ours.get()), second(other.get());
  bool ended = false, second_ended = false, ended_closed = true;
  {
    const NoDescriptors none;
    ended = socket.End();
    second_ended = second.End();
    ASSERT_EQ(dup3(file.get(), ours.get(), O_CLOEXEC), ours.get()) << "the owner closes it";
    ended_closed = socket.End();
  }
  EXPECT_TRUE(ended);
  EXPECT_TRUE(second_ended);
  EXPECT_FALSE(ended_closed);
  char byte = 0;
  EXPECT_EQ(recv(others_client.get(), &byte, 1, 0), 0);
  EXPECT_EQ(recv(other.get(), &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_EQ(recv(theirs.get(), &byte, 1, 0), 0);
}

INSTANTIATE_TEST_SUITE_P(Sockets, BorrowedSocketTest, testing::Values(UnixPair, TcpPair),
                         [](const auto& one) { return one.index == 0 ? "Unix" : "Tcp"; });

TEST(BorrowedUnixSocketTest, IsFullUntilTheOtherSideReads) {
  auto [ours, theirs] = UnixPair();
  const BorrowedSocket socket(ours.get());
  EXPECT_FALSE(socket.IsFull());
  char bytes[4096] = {};
  while (send(ours.get(), bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
  }
  EXPECT_TRUE(socket.IsFull());
  while (recv(theirs.get(), bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
  }
  EXPECT_FALSE(socket.IsFull());
  ours.reset();
  EXPECT_FALSE(socket.IsFull());
}

TEST(BorrowedSocketTest, ALaterSocketWithTheSameNumberIsAnother) {
  Pair first = UnixPair();
  const Pair second = UnixPair();
  const BorrowedSocket socket(first.first.get());
  ASSERT_EQ(dup3(second.first.get(), first.first.get(), O_CLOEXEC), first.first.get());
  EXPECT_FALSE(socket.IsOpen());
  EXPECT_FALSE(socket.End());
  char byte = 'x';
  EXPECT_EQ(send(second.second.get(), &byte, 1, MSG_NOSIGNAL), 1) << "the other one goes on";
  first.first.reset();
  EXPECT_FALSE(socket.IsOpen());
}

TEST(BorrowedSocketTest, OtherDescriptorsAreNoSockets) {
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const BorrowedSocket& socket :
       {BorrowedSocket(), BorrowedSocket(-1), BorrowedSocket(file.get())}) {
    EXPECT_FALSE(socket.IsOpen());
    EXPECT_FALSE(socket.End());
  }
}

}  // namespace
}  // namespace gradsync::daemon
