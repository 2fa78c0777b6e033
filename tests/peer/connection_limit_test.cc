#include "daemon/peer/connection_limit.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/vain_bytes.h"
#include "daemon/session/descriptor_quota.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;

sockaddr_storage Address(const std::string& host, std::uint16_t port) {
  return ParseAddress(host, port).value().storage;
}

// A connection: the daemon's end, and the peer's.
struct Connection {
  Connection() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    ours = UniqueFd(ends[0]);
    theirs = UniqueFd(ends[1]);
  }
  bool ended() const {
    char byte = 0;
    return recv(theirs.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }
  UniqueFd ours, theirs;
};

class ConnectionLimitTest : public testing::Test {
 protected:
  explicit ConnectionLimitTest(const ConnectionLimit::Bounds& bounds = {2, 3, 5})
      : limit_(bounds, &clock_) {}

  absl::Status Admit(const std::string& host, std::uint16_t port, ConnectionLimit::Place place) {
    auto connection = std::make_unique<Connection>();
    const absl::Status status =
        limit_.Admit(connection->ours.get(), Address(host, port), [&] { return place; });
    if (status.ok()) connections_.push_back(std::move(connection));
    return status;
  }

  absl::Status Admit(const std::string& host, std::uint16_t port) {
    return Admit(host, port, ConnectionLimit::Place{});
  }
  // From another port each time.
  absl::Status Admit(const std::string& host) { return Admit(host, ++last_port_); }
  // From this machine.
  absl::Status AdmitLocal(const std::string& host, std::uint16_t port,
                          std::optional<std::uint32_t> user) {
    return Admit(host, port, ConnectionLimit::Place{true, user});
  }

  std::uint16_t last_port_ = 10'000;
  ManualClock clock_;
  ConnectionLimit limit_;
  std::vector<std::unique_ptr<Connection>> connections_;
};

TEST(ConnectionBoundsTest, AUserAndAllCallersLeaveTheDaemonItsOwnDescriptors) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  for (rlim_t all = 256; all <= before.rlim_max && all <= (1 << 20); all *= 2) {
    const rlimit limit{all, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const ConnectionLimit::Bounds bounds = ConnectionLimit::OfProcess();
    const std::size_t own = std::min<std::size_t>(all / 2, 256);
    EXPECT_LE(bounds.all + DescriptorQuota::PerUserOfProcess() + own, all);
    EXPECT_LE(2 * bounds.per_network, bounds.all) << "one network leaves room for others";
    EXPECT_LE(2 * bounds.per_caller, bounds.per_network) << "one caller leaves its network room";
    EXPECT_GT(bounds.per_caller, 0u);
  }
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(ConnectionLimitTest, AnAddressLeavesRoomForTheOthers) {
  EXPECT_TRUE(Admit("10.0.0.1").ok());
  EXPECT_TRUE(Admit("10.0.0.1").ok());
  const absl::Status refused = Admit("10.0.0.1");
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "its address has 2 connections")) << refused;
  EXPECT_TRUE(Admit("10.0.0.2").ok());
}

TEST_F(ConnectionLimitTest, AllAddressesTogetherHaveABound) {
  for (int host = 1; host <= 5; ++host) EXPECT_TRUE(Admit(absl::StrCat("10.0.0.", host)).ok());
  const absl::Status refused = Admit("10.0.0.6");
  EXPECT_TRUE(absl::StrContains(refused.message(), "other nodes have 5 connections")) << refused;
  connections_.erase(connections_.begin());
  clock_.Advance(kSecondNs);
  EXPECT_TRUE(Admit("10.0.0.6").ok());
}

// gRPC closes a connection and tells no one. The next one may get its number.
TEST_F(ConnectionLimitTest, AClosedConnectionCountsNoMore) {
  ASSERT_TRUE(Admit("10.0.0.1").ok() && Admit("10.0.0.1").ok());
  connections_.clear();
  EXPECT_TRUE(Admit("10.0.0.1").ok()) << "it looks at once";
  EXPECT_TRUE(Admit("10.0.0.1").ok());
  connections_.clear();
  EXPECT_FALSE(Admit("10.0.0.1").ok()) << "it has looked a moment ago";
  clock_.Advance(kSecondNs);
  EXPECT_TRUE(Admit("10.0.0.1").ok());
}

TEST_F(ConnectionLimitTest, AMappedAddressIsTheSame) {
  ASSERT_TRUE(Admit("2001:db8::1").ok() && Admit("2001:db8::1").ok());
  EXPECT_FALSE(Admit("2001:db8::1").ok());
  EXPECT_TRUE(Admit("2001:db8::2").ok());
  ASSERT_TRUE(Admit("10.0.0.1").ok() && Admit("::ffff:10.0.0.1").ok());
  const absl::Status refused = Admit("10.0.0.1");
  EXPECT_TRUE(absl::StrContains(refused.message(), "its address has 2 connections")) << refused;
}

TEST_F(ConnectionLimitTest, ANetworkLeavesRoomForTheOthers) {
  for (int host = 1; host <= 3; ++host) {
    ASSERT_TRUE(Admit(absl::StrCat("2001:db8:0:1:", host, "::1")).ok());
  }
  const absl::Status refused = Admit("2001:db8:0:1::9");
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_TRUE(
      absl::StrContains(refused.message(), "the network 2001:db8:0:1::/64 has 3 connections"))
      << refused;
  EXPECT_TRUE(Admit("2001:db8:0:2::1").ok());
  connections_.erase(connections_.begin());
  clock_.Advance(kSecondNs);
  EXPECT_TRUE(Admit("2001:db8:0:1::9").ok()) << "one of its connections is closed";
}

// The addresses of a network are callers of their own.
TEST_F(ConnectionLimitTest, FindsAConnectionAmongThoseOfItsNetwork) {
  const std::string prefix("\x20\x01\x0d\xb8\0\0\0\1\0\0\0\0\0\0\0", 15);
  const std::string first = prefix + '\1', second = prefix + '\2';
  ASSERT_TRUE(Admit("2001:db8:0:1::1", 1).ok() && Admit("2001:db8:0:1::2", 1).ok());
  EXPECT_EQ(limit_.OwnEnds(first, 1).size(), 1u);
  EXPECT_TRUE(limit_.CallerAt(first, 1).has_value());
  EXPECT_NE(limit_.CallerAt(first, 1), limit_.CallerAt(second, 1));
  EXPECT_FALSE(limit_.CallerAt(prefix + '\3', 1).has_value());
  EXPECT_TRUE(limit_.End(second, 1));
  EXPECT_FALSE(connections_[0]->ended());
  EXPECT_TRUE(connections_[1]->ended());
  EXPECT_TRUE(Admit("2001:db8:0:1::1", 2).ok()) << "only the other address is paused";
}

// Its last eighth is two connections.
class ReservedPlaces : public ConnectionLimitTest {
 protected:
  static constexpr int kAll = 18;
  static constexpr int kFew = ConnectionLimit::kFew;

  ReservedPlaces() : ConnectionLimitTest({2 * kFew, kAll, kAll}) {}
};

TEST_F(ReservedPlaces, AreForThoseThatHaveFewConnections) {
  const int busy = kAll - kAll / ConnectionLimit::kReservedPart;
  for (int i = 0; i < busy; ++i) {
    ASSERT_TRUE(Admit(i % 2 == 0 ? "10.0.0.1" : "10.0.0.2").ok());
  }
  const absl::Status refused = Admit("10.0.0.1");
  EXPECT_TRUE(absl::StrContains(refused.message(), "those that have fewer than 8")) << refused;
  EXPECT_FALSE(Admit("10.0.0.2").ok());
  EXPECT_TRUE(Admit("10.0.0.3").ok());
  EXPECT_TRUE(Admit("10.0.0.3").ok());
  EXPECT_FALSE(Admit("10.0.0.4").ok()) << "there are no more places";
}

// Each of its addresses has only one connection.
TEST_F(ReservedPlaces, AreNotForABusyNetwork) {
  const int busy = kAll - kAll / ConnectionLimit::kReservedPart;
  for (int host = 1; host <= busy; ++host) {
    ASSERT_TRUE(Admit(absl::StrCat("2001:db8::", host)).ok());
  }
  EXPECT_FALSE(Admit("2001:db8::99").ok());
  EXPECT_TRUE(Admit("10.0.0.1").ok());
}

TEST_F(ConnectionLimitTest, EndsTheConnectionOfAPort) {
  const std::string ip("\x0a\0\0\1", 4);
  ASSERT_TRUE(Admit("10.0.0.1", 1).ok() && Admit("::ffff:10.0.0.1", 2).ok());
  ASSERT_TRUE(Admit("10.0.0.2", 1).ok());
  EXPECT_FALSE(limit_.End(ip, 3));
  EXPECT_FALSE(limit_.End("", 1));
  EXPECT_TRUE(limit_.End(ip, 2));
  EXPECT_FALSE(connections_[0]->ended());
  EXPECT_TRUE(connections_[1]->ended());
  EXPECT_FALSE(connections_[2]->ended());
  EXPECT_TRUE(limit_.End(ip, 1));
  EXPECT_TRUE(connections_[0]->ended());
  EXPECT_FALSE(connections_[2]->ended());
  connections_.erase(connections_.begin(), connections_.begin() + 2);
  EXPECT_FALSE(limit_.End(ip, 1)) << "it is closed";
}

TEST_F(ConnectionLimitTest, FindsThisSideOfTheConnectionsOfAPort) {
  const std::string ip("\x0a\0\0\1", 4);
  ASSERT_TRUE(Admit("10.0.0.1", 1).ok() && Admit("::ffff:10.0.0.1", 2).ok());
  ASSERT_TRUE(Admit("10.0.0.2", 1).ok());
  EXPECT_EQ(limit_.OwnEnds(ip, 1).size(), 1u);
  EXPECT_EQ(limit_.OwnEnds(ip, 2).size(), 1u);
  EXPECT_TRUE(limit_.OwnEnds(ip, 3).empty());
  EXPECT_TRUE(limit_.OwnEnds("", 1).empty());
  connections_.clear();
  EXPECT_TRUE(limit_.OwnEnds(ip, 1).empty()) << "it is closed";
}

TEST_F(ConnectionLimitTest, AnAddressWaitsAfterTheEnd) {
  ASSERT_TRUE(Admit("10.0.0.1", 4711).ok());
  EXPECT_TRUE(limit_.End(std::string("\x0a\0\0\1", 4), 4711));
  connections_.clear();
  const absl::Status refused = Admit("10.0.0.1");
  EXPECT_TRUE(absl::StrContains(refused.message(), "it may connect again in 1 s")) << refused;
  EXPECT_TRUE(Admit("10.0.0.2").ok());
  clock_.Advance(kSecondNs);
  EXPECT_TRUE(Admit("10.0.0.1").ok());
}

TEST_F(ConnectionLimitTest, AnAddressWaitsLongerAfterTheNextEnd) {
  const std::string ip("\x0a\0\0\1", 4);
  ASSERT_TRUE(Admit("10.0.0.1", 4711).ok());
  EXPECT_TRUE(limit_.End(ip, 4711));
  connections_.clear();
  clock_.Advance(kSecondNs);
  ASSERT_TRUE(Admit("10.0.0.1", 4711).ok());
  EXPECT_TRUE(limit_.End(ip, 4711));
  connections_.clear();
  clock_.Advance(kSecondNs);
  const absl::Status refused = Admit("10.0.0.1");
  EXPECT_TRUE(absl::StrContains(refused.message(), "it may connect again in 1 s")) << refused;
  clock_.Advance(kSecondNs);
  EXPECT_TRUE(Admit("10.0.0.1").ok());
}

TEST_F(ConnectionLimitTest, RemembersAnAddressThatDidHarmAmongMany) {
  const std::string ip("\x0a\0\0\1", 4);
  ASSERT_TRUE(Admit("10.0.0.1", 4711).ok());
  EXPECT_TRUE(limit_.End(ip, 4711));
  connections_.clear();
  int admitted = 0;
  for (int host = 0; host < 20'000; ++host) {
    admitted += Admit(absl::StrCat("10.1.", host / 250, ".", host % 250)).ok() ? 1 : 0;
    connections_.clear();
    clock_.Advance(kSecondNs / 25'000);
  }
  EXPECT_GT(admitted, 5) << "it forgets those that have no connection";
  EXPECT_FALSE(Admit("10.0.0.1").ok());
}

TEST_F(ConnectionLimitTest, AUserOfThisMachineIsOneCallerAtAllAddresses) {
  const std::string ip("\x7f\0\0\1", 4);
  constexpr std::uint32_t kStranger = 54321;
  ASSERT_TRUE(AdmitLocal("127.0.0.1", 1, kStranger).ok());
  ASSERT_TRUE(AdmitLocal("127.0.0.2", 2, kStranger).ok());
  const absl::Status refused = AdmitLocal("127.0.0.3", 3, kStranger);
  EXPECT_TRUE(absl::StrContains(refused.message(), "user 54321 of this machine has 2 connections"))
      << refused;
  EXPECT_TRUE(AdmitLocal("127.0.0.1", 3, 0).ok());
  EXPECT_TRUE(limit_.End(ip, 1));
  EXPECT_TRUE(connections_[0]->ended());
  EXPECT_FALSE(connections_[1]->ended());
  EXPECT_FALSE(AdmitLocal("127.0.0.4", 5, kStranger).ok());
  EXPECT_TRUE(AdmitLocal("127.0.0.1", 5, 0).ok()) << "it did no harm";
  EXPECT_EQ(limit_.OwnEnds(ip, 3).size(), 1u);
}

TEST_F(ConnectionLimitTest, SaysWhoseConnectionItIs) {
  const std::string first("\x7f\0\0\1", 4), second("\x7f\0\0\2", 4);
  ASSERT_TRUE(AdmitLocal("127.0.0.1", 1, 54321).ok() && AdmitLocal("127.0.0.2", 2, 54321).ok());
  ASSERT_TRUE(AdmitLocal("127.0.0.1", 3, 0).ok() && AdmitLocal("127.0.0.2", 4, 0).ok());
  EXPECT_TRUE(limit_.CallerAt(first, 1).has_value());
  EXPECT_EQ(limit_.CallerAt(first, 1), limit_.CallerAt(second, 2)) << "one user";
  EXPECT_NE(limit_.CallerAt(first, 1), limit_.CallerAt(first, 3)) << "two users";
  EXPECT_NE(limit_.CallerAt(first, 3), limit_.CallerAt(second, 4)) << "two daemons";
  connections_.clear();
  EXPECT_FALSE(limit_.CallerAt(first, 1).has_value()) << "it is closed";
}

TEST_F(ConnectionLimitTest, RootIsACallerOfItsOwnAtEachAddress) {
  ASSERT_TRUE(AdmitLocal("127.0.0.1", 1, 0).ok() && AdmitLocal("127.0.0.1", 2, 0).ok());
  EXPECT_FALSE(AdmitLocal("127.0.0.1", 3, 0).ok());
  EXPECT_TRUE(AdmitLocal("127.0.0.2", 3, 0).ok());
}

TEST_F(ConnectionLimitTest, UnknownUsersOfThisMachineAreOneCaller) {
  ASSERT_TRUE(AdmitLocal("127.0.0.1", 1, std::nullopt).ok());
  ASSERT_TRUE(AdmitLocal("127.0.0.2", 2, std::nullopt).ok());
  EXPECT_FALSE(AdmitLocal("127.0.0.3", 3, std::nullopt).ok());
  EXPECT_TRUE(AdmitLocal("127.0.0.3", 3, 0).ok());
}

// A caller that sends over real connections, because only TCP counts what has come.
class SilentSenders : public testing::Test {
 protected:
  struct Sender {
    UniqueFd ours, theirs;
    sockaddr_storage peer{};  // the address of theirs
  };

  SilentSenders() {
    const sockaddr_storage any = Address("127.0.0.1", 0);
    EXPECT_EQ(bind(listener_.get(), Generic(any), sizeof(sockaddr_in)), 0);
    EXPECT_EQ(listen(listener_.get(), 16), 0);
  }
  static const sockaddr* Generic(const sockaddr_storage& address) {
    return reinterpret_cast<const sockaddr*>(&address);
  }
  // A connection of this user.
  Sender Connect(std::uint32_t user) {
    Sender sender;
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    EXPECT_EQ(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    sender.theirs = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(sender.theirs.get(), Generic(address), size), 0);
    size = sizeof(sender.peer);
    EXPECT_EQ(getsockname(sender.theirs.get(), reinterpret_cast<sockaddr*>(&sender.peer), &size),
              0);
    sender.ours = UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const absl::Status admitted = limit_.Admit(sender.ours.get(), sender.peer, [&] {
      return ConnectionLimit::Place{true, user};
    });
    EXPECT_TRUE(admitted.ok()) << admitted;
    return sender;
  }
  // It has come when this returns.
  static void Send(const Sender& sender, std::size_t bytes) {
    std::string data(bytes, 'a');
    ASSERT_EQ(send(sender.theirs.get(), data.data(), bytes, 0), static_cast<ssize_t>(bytes));
    iovec part{data.data(), bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    // As gRPC reads.
    ASSERT_EQ(recvmsg(sender.ours.get(), &message, MSG_WAITALL), static_cast<ssize_t>(bytes));
  }
  // How many connections a look ends.
  std::size_t Look() {
    return limit_.EndSilent({kFirst, kMuch}, [this] { return greeted_; }).size();
  }
  static bool Ended(const Sender& sender) {
    char byte = 0;
    return recv(sender.theirs.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }

  static constexpr std::uint64_t kMuch = 1000;     // for a caller, between two looks
  static constexpr std::uint64_t kFirst = 10'000;  // for a connection that has not greeted
  static constexpr std::uint32_t kStranger = 54321;

  ManualClock clock_;
  ConnectionLimit limit_{{8, 8, 16}, &clock_};
  UniqueFd listener_{socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::set<TcpEnd> greeted_;
};

TEST_F(SilentSenders, ConnectionThatSendsMuchTwiceEnds) {
  const Sender sender = Connect(kStranger);
  Send(sender, kMuch + 1);
  EXPECT_EQ(Look(), 0u);
  Send(sender, kMuch);
  EXPECT_EQ(Look(), 0u) << "not more than it may";
  Send(sender, kMuch + 1);
  EXPECT_EQ(Look(), 0u);
  Send(sender, kMuch + 1);
  EXPECT_EQ(Look(), 1u);
  EXPECT_TRUE(Ended(sender));
}

TEST_F(SilentSenders, ConnectionsInTurnsEnd) {
  const Sender one = Connect(kStranger);
  const Sender other = Connect(kStranger);
  Send(one, kMuch + 1);
  EXPECT_EQ(Look(), 0u);
  Send(other, kMuch + 1);
  EXPECT_EQ(Look(), 1u);
  EXPECT_FALSE(Ended(one)) << "it sends nothing";
  EXPECT_TRUE(Ended(other));
}

TEST_F(SilentSenders, ConnectionsThatSendMuchTogetherEnd) {
  std::vector<Sender> senders;
  for (int i = 0; i < 4; ++i) senders.push_back(Connect(kStranger));
  for (const std::size_t ended : {0, 4}) {
    for (const Sender& sender : senders) Send(sender, kMuch / 2);
    EXPECT_EQ(Look(), ended);
  }
}

TEST_F(SilentSenders, CallerMayNotConnectAgainAtOnce) {
  const Sender sender = Connect(kStranger);
  for (const std::size_t ended : {0, 1}) {
    Send(sender, kMuch + 1);
    EXPECT_EQ(Look(), ended);
  }
  const auto admit = [&](std::uint16_t port) {
    return limit_.Admit(sender.ours.get(), Address("127.0.0.1", port), [] {
      return ConnectionLimit::Place{true, kStranger};
    });
  };
  EXPECT_FALSE(admit(1).ok());
  clock_.Advance(kSecondNs);
  EXPECT_TRUE(admit(1).ok());
}

TEST_F(SilentSenders, OtherCallersAndGreetedConnectionsStay) {
  const Sender sender = Connect(kStranger);
  const Sender other = Connect(kStranger + 1);
  const Sender daemon = Connect(kStranger);
  greeted_.insert(TcpEnd::Of(daemon.peer));
  for (const std::size_t ended : {0, 1}) {
    Send(sender, kMuch + 1);
    Send(other, kMuch);
    Send(daemon, 5 * kMuch);
    EXPECT_EQ(Look(), ended);
  }
  EXPECT_TRUE(Ended(sender));
  EXPECT_FALSE(Ended(other));
  EXPECT_FALSE(Ended(daemon));
}

TEST_F(SilentSenders, SlowSenderMayNotSendForEver) {
  const Sender sender = Connect(kStranger);
  for (std::uint64_t sent = 0; sent + kMuch <= kFirst; sent += kMuch) {
    Send(sender, kMuch);
    EXPECT_EQ(Look(), 0u);
  }
  for (const std::size_t ended : {0, 1}) {
    Send(sender, kMuch);
    EXPECT_EQ(Look(), ended);
  }
}

TEST_F(SilentSenders, ConnectionWhoseStreamsHaveEndedMaySendALittle) {
  const Sender daemon = Connect(kStranger);
  greeted_.insert(TcpEnd::Of(daemon.peer));
  Send(daemon, 2 * kFirst);
  EXPECT_EQ(Look(), 0u);
  greeted_.clear();
  for (int i = 0; i < 10; ++i) {
    Send(daemon, kMuch);
    EXPECT_EQ(Look(), 0u);
  }
}

class VainSenders : public SilentSenders {
 protected:
  static constexpr std::size_t kPiece = 10'000;
  static constexpr VainBytes::Most kMost = {10 * kPiece, 25 * kPiece, kPiece};

  // Sends them, and reads them on the other side.
  static void SendPieces(const Sender& sender, int pieces) {
    for (int i = 0; i < pieces; ++i) Send(sender, kPiece);
  }
  // As a stream does that gets a message.
  void Hear(const Sender& sender, std::size_t bytes) { InputOf(sender)->Count(bytes); }
  std::shared_ptr<ClientInput> InputOf(const Sender& sender) {
    const TcpEnd end = TcpEnd::Of(sender.peer);
    return limit_.InputOf(std::string(end.ip.begin(), end.ip.end()), end.port);
  }
  std::size_t Look() { return limit_.EndVain(kMost).size(); }
};

TEST_F(VainSenders, EndOnceMuchWasReadWithoutACallOrMessage) {
  const Sender sender = Connect(kStranger);
  const Sender other = Connect(kStranger);
  SendPieces(sender, 10);
  SendPieces(other, 10);
  EXPECT_EQ(Look(), 0u) << "not more than it may";
  Send(sender, 1);
  EXPECT_EQ(Look(), 1u);
  EXPECT_TRUE(Ended(sender));
  EXPECT_FALSE(Ended(other));
  EXPECT_EQ(Look(), 0u) << "it has ended already";
  const absl::Status refused = limit_.Admit(other.ours.get(), Address("127.0.0.1", 1), [] {
    return ConnectionLimit::Place{true, kStranger};
  });
  EXPECT_TRUE(absl::StrContains(refused.message(), "did harm")) << refused;
}

class RefusedSenders : public VainSenders {
 protected:
  // One call is allowed, and two come. Then the daemon closes the connection.
  static void MakeTwoCallsAndEnd(Sender* sender) {
    BorrowedSocket(sender->ours.get()).LimitHeaders(HeaderFrames(/*most_calls=*/1));
    std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for (const char stream : {1, 3}) bytes += std::string("\0\0\0\1\4\0\0\0", 8) + stream;
    ASSERT_EQ(send(sender->theirs.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    ASSERT_EQ(recvmsg(sender->ours.get(), &message, MSG_WAITALL), 0) << "refused";
    sender->ours = UniqueFd();
  }
  absl::Status Admit(const Sender& sender) {
    return limit_.Admit(sender.ours.get(), Address("127.0.0.1", 1), [] {
      return ConnectionLimit::Place{true, kStranger};
    });
  }
};

TEST_F(RefusedSenders, ArePausedAlthoughANewConnectionHasTheirDescriptor) {
  UniqueFd early(dup(listener_.get()));
  Sender sender = Connect(kStranger);
  const int number = sender.ours.get();
  MakeTwoCallsAndEnd(&sender);
  early = UniqueFd();  // its number is for the client's end
  const Sender next = Connect(kStranger);
  ASSERT_EQ(next.ours.get(), number);
  BorrowedSocket(number).LimitHeaders(HeaderFrames(/*most_calls=*/1));
  EXPECT_EQ(Look(), 1u);
  EXPECT_FALSE(Ended(next));
  const absl::Status refused = Admit(next);
  EXPECT_TRUE(absl::StrContains(refused.message(), "did harm")) << refused;
  clock_.Advance(kSecondNs);
  EXPECT_EQ(Look(), 0u) << "it counts once";
  EXPECT_TRUE(Admit(next).ok());
}

TEST_F(RefusedSenders, ArePausedWhenTheirPlacesAreNeeded) {
  std::vector<Sender> senders;
  for (int i = 0; i < 8; ++i) senders.push_back(Connect(kStranger));
  MakeTwoCallsAndEnd(&senders[0]);
  const absl::Status refused = Admit(senders[1]);
  EXPECT_TRUE(absl::StrContains(refused.message(), "did harm")) << refused;
}

TEST_F(VainSenders, StayIfMessagesComeOfWhatIsRead) {
  const Sender sender = Connect(kStranger);
  for (int message = 0; message < 5; ++message) {
    SendPieces(sender, 9);
    EXPECT_EQ(Look(), 0u) << "a message has not come as a whole";
    Hear(sender, 9 * kPiece);
    EXPECT_EQ(Look(), 0u);
  }
  SendPieces(sender, 10);
  Send(sender, 1);
  EXPECT_EQ(Look(), 1u) << "the messages of earlier do not count for ever";
}

TEST_F(VainSenders, EndIfShortMessagesComeBesideALongOneWithoutEnd) {
  const Sender sender = Connect(kStranger);
  for (int piece = 0; piece < 10; ++piece) {
    SendPieces(sender, 1);
    Hear(sender, 0);
    EXPECT_EQ(Look(), 0u);
  }
  SendPieces(sender, 1);
  EXPECT_EQ(Look(), 1u);
}

TEST_F(VainSenders, EndIfMuchWasReadOfACallersConnectionsTogether) {
  std::vector<Sender> senders;
  for (int i = 0; i < 5; ++i) senders.push_back(Connect(kStranger));
  const Sender modest = Connect(kStranger);
  const Sender other = Connect(kStranger + 1);
  for (const Sender& sender : senders) SendPieces(sender, 5);
  SendPieces(other, 5);
  EXPECT_EQ(Look(), 0u) << "not more than they may";
  SendPieces(modest, 1);
  EXPECT_EQ(Look(), 5u);
  EXPECT_FALSE(Ended(modest));
  EXPECT_FALSE(Ended(other));
}

// gRPC's threads have other things to do.
TEST_F(VainSenders, StayWhileNothingIsRead) {
  const Sender sender = Connect(kStranger);
  const std::string data(11 * kPiece, 'a');
  ASSERT_EQ(send(sender.theirs.get(), data.data(), data.size(), 0),
            static_cast<ssize_t>(data.size()));
  EXPECT_EQ(Look(), 0u);
}

TEST_F(VainSenders, BytesOfALaterConnectionWithTheSameNumberDoNotCount) {
  Sender closed = Connect(kStranger);
  const Sender other = Connect(kStranger);
  const int number = closed.ours.get();
  closed.theirs.reset();
  closed.ours.reset();
  const Sender later = Connect(kStranger + 1);
  ASSERT_EQ(later.ours.get(), number);
  for (int i = 0; i < 4; ++i) {
    SendPieces(later, 9);
    Hear(later, 9 * kPiece);
    EXPECT_EQ(Look(), 0u);
  }
  SendPieces(other, 2);
  EXPECT_EQ(Look(), 0u);
}

TEST_F(VainSenders, EndAfterACallWithTooLongHeaders) {
  const Sender sender = Connect(kStranger);
  InputOf(sender)->long_headers = true;
  EXPECT_EQ(Look(), 1u);
  EXPECT_TRUE(Ended(sender));
}

TEST_F(VainSenders, InputIsThatOfTheConnection) {
  const Sender one = Connect(kStranger);
  const Sender other = Connect(kStranger);
  EXPECT_NE(InputOf(one), nullptr);
  EXPECT_EQ(InputOf(one), InputOf(one));
  EXPECT_NE(InputOf(one), InputOf(other));
  EXPECT_EQ(limit_.InputOf("", 1), nullptr);
}

// gRPC names a caller by its address and port alone.
TEST_F(ConnectionLimitTest, PortThatIsInUseIsRefused) {
  ASSERT_TRUE(AdmitLocal("127.0.0.1", 1, 0).ok());
  const absl::Status refused = AdmitLocal("127.0.0.1", 1, 54321);
  EXPECT_TRUE(absl::StrContains(refused.message(), "another connection from port 1")) << refused;
  connections_.clear();
  EXPECT_TRUE(AdmitLocal("127.0.0.1", 1, 54321).ok()) << "it is closed";
}

}  // namespace
}  // namespace gradsync::daemon
