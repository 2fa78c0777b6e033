// The side socket gives descriptors once, and only to the session's own process.

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"
#include "tests/fault/raw_session.h"
#include "tests/fault/trainer.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

constexpr std::uint32_t kInvalidArgument = 3;
constexpr std::uint32_t kNotFound = 5;
constexpr std::uint32_t kFailedPrecondition = 9;

// Returns a connected socket of `type`.
Descriptor Connect(const std::string& path, int type) {
  Descriptor fd = ConnectUnix(path, type);
  EXPECT_GE(fd.get(), 0);
  return fd;
}

// Checks that the daemon still serves a complete job of two trainers.
void ExpectServesOn(const TestDaemon& daemon) {
  const auto trainers = JoinedTrainers(daemon, 2, "afterwards");
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step times=2");
  ExpectAll(trainers, "broadcast 10000 1");
  ExpectAll(trainers, "leave");
}

TEST(SideSocket, RefusesMalformedRequestsAndSaysWhatItExpects) {
  TestDaemon daemon;
  std::mt19937 random(1);
  const std::string good = FdRequestBytes(std::string(kNonceBytes, 'x'));
  std::vector<std::string> packets = {good.substr(0, good.size() - 1), good + "x", "G", "GET / ",
                                      std::string(100'000, 'y')};
  for (int i = 0; i < 50; ++i) {
    std::string packet(1 + random() % 64, '\0');
    for (char& byte : packet) byte = static_cast<char>(random());
    packets.push_back(packet);
  }
  for (const std::string& packet : packets) {
    const FdAnswer answer = AskSideSocket(daemon.side_socket(), packet);
    ASSERT_TRUE(answer.answered);
    EXPECT_EQ(answer.status, kInvalidArgument);
    EXPECT_NE(answer.message.find("expects one FdRequest"), std::string::npos);
    EXPECT_TRUE(answer.descriptors.empty());
  }
  ExpectServesOn(daemon);
}

TEST(SideSocket, RefusesAnotherAbi) {
  TestDaemon daemon;
  std::string packet = FdRequestBytes(std::string(kNonceBytes, 'x'));
  packet[offsetof(FdRequest, abi)] = 77;
  const FdAnswer answer = AskSideSocket(daemon.side_socket(), packet);
  EXPECT_EQ(answer.status, kFailedPrecondition);
  EXPECT_NE(answer.message.find("shared-memory ABI 77"), std::string::npos) << answer.message;
}

TEST(SideSocket, SurvivesSilentAndLeavingClients) {
  TestDaemon daemon;
  std::vector<Descriptor> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(Connect(daemon.side_socket(), SOCK_SEQPACKET));
  silent.erase(silent.begin(), silent.begin() + 50);
  ASSERT_EQ(daemon.Status().jobs_size(), 0);
  silent.clear();
  ExpectServesOn(daemon);
}

TEST(Nonce, ReturnsItsDescriptorsOnceAndOnlyToItsProcess) {
  TestDaemon daemon;
  RawSession owner(daemon.socket());
  ASSERT_TRUE(owner.Open(0, 1, "job").has_value());
  const auto assigned = owner.Register(RawSession::LayoutRequest(2, 1000));
  ASSERT_TRUE(assigned.has_value());

  const FdAnswer wrong =
      AskSideSocket(daemon.side_socket(), FdRequestBytes(std::string(kNonceBytes, '\1')));
  EXPECT_EQ(wrong.status, kNotFound);
  EXPECT_NE(wrong.message.find("nonce"), std::string::npos) << wrong.message;

  // Another process of the same user.
  Trainer thief(daemon, 0, 1, "thief");
  const Reply stolen = thief.Do("claim " + absl::BytesToHexString(assigned->nonce()) +
                                " socket=" + daemon.side_socket());
  EXPECT_EQ(stolen.code, "PERMISSION_DENIED") << stolen;
  EXPECT_EQ(stolen.Field("descriptors"), "0");

  const FdAnswer own = AskSideSocket(daemon.side_socket(), FdRequestBytes(assigned->nonce()));
  EXPECT_EQ(own.status, 0u) << own.message;
  EXPECT_EQ(own.descriptors.size(), 2u);
  const FdAnswer again = AskSideSocket(daemon.side_socket(), FdRequestBytes(assigned->nonce()));
  EXPECT_EQ(again.status, kNotFound);
  EXPECT_TRUE(again.descriptors.empty());
}

TEST(Nonce, EndsWithItsSession) {
  TestDaemon daemon;
  std::string nonce;
  {
    RawSession owner(daemon.socket());
    const auto opened = owner.Open(0, 1, "job");
    ASSERT_TRUE(opened.has_value());
    nonce = opened->staging_nonce();
  }
  ASSERT_TRUE(daemon.AwaitStatus([](const auto& status) { return status.arena_bytes() == 0; }));
  EXPECT_EQ(AskSideSocket(daemon.side_socket(), FdRequestBytes(nonce)).status, kNotFound);
}

TEST(GrpcSocket, SurvivesGarbage) {
  TestDaemon daemon;
  std::mt19937 random(2);
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  std::vector<std::string> openings = {
      "GET / HTTP/1.1\r\n\r\n", preface.substr(0, 10), preface,
      // SETTINGS whose announced bytes never arrive.
      preface + std::string("\0\xff\xff\4\0\0\0\0\0", 9),
      // HEADERS that end too early.
      preface + std::string("\0\0\0\4\0\0\0\0\0", 9) + std::string("\0\0\x20\1\4\0\0\0\1\x82", 10)};
  for (int i = 0; i < 60; ++i) {
    std::string bytes = i % 2 == 0 ? preface + std::string("\0\0\0\4\0\0\0\0\0", 9) : "";
    const std::size_t size = 1 + random() % 3000;
    for (std::size_t j = 0; j < size; ++j) bytes.push_back(static_cast<char>(random()));
    openings.push_back(bytes);
  }
  std::vector<Descriptor> open;
  for (const std::string& bytes : openings) {
    open.push_back(Connect(daemon.socket(), SOCK_STREAM));
    // The daemon may have closed the connection already.
    if (send(open.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) continue;
    if (open.size() > 20) open.erase(open.begin());
  }
  ExpectServesOn(daemon);
  open.clear();
  ExpectServesOn(daemon);
}

// A process that reads such a message, or closes the connection with it, also closes the
// descriptor. That takes as long as the client likes, if it is a TCP socket with SO_LINGER.
TEST(Sockets, RefuseDescriptors) {
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS, since Linux 6.16
  int passes = 0;
  socklen_t size = sizeof(passes);
  const Descriptor any(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (getsockopt(any.get(), SOL_SOCKET, kPassRights, &passes, &size) != 0) {
    GTEST_SKIP() << "this kernel cannot refuse descriptors";
  }
  TestDaemon daemon;
  for (const auto& [path, type] :
       {std::pair{daemon.socket(), SOCK_STREAM}, std::pair{daemon.side_socket(), SOCK_SEQPACKET}}) {
    const Descriptor connection = Connect(path, type);
    char byte = 'x';
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int passed = any.get();
    std::memcpy(CMSG_DATA(header), &passed, sizeof(passed));
    EXPECT_EQ(sendmsg(connection.get(), &message, MSG_NOSIGNAL), -1) << path;
    EXPECT_EQ(errno, EPERM) << path;
  }
  ExpectServesOn(daemon);
}

TEST(Sockets, RefuseTheOtherSocketType) {
  TestDaemon daemon;
  EXPECT_LT(ConnectUnix(daemon.socket(), SOCK_SEQPACKET).get(), 0);
  ExpectServesOn(daemon);
}

// ---- Tokens

TEST(Token, MissingTokenIsRefusedIfRequired) {
  TestDaemon daemon({"--require_token=true"});
  Trainer without(daemon, 0, 1);
  const Reply reply = without.Join();
  EXPECT_EQ(reply.code, "PERMISSION_DENIED") << reply;
  EXPECT_EQ(reply.reason, "CREDENTIALS") << reply;
  EXPECT_NE(reply.message.find("GRADSYNC_JOB_TOKEN"), std::string::npos) << reply;
  Trainer with(daemon, 0, 1, "job", "token=secret");
  EXPECT_TRUE(with.Join().ok());
}

TEST(Token, DifferentTokenMakesAnotherJobAndIsNeverLogged) {
  TestDaemon daemon({"--log_level=debug"});
  const auto red = JoinedTrainers(daemon, 2, "job", "token=crimson");
  const auto blue = JoinedTrainers(daemon, 2, "job", "token=azure");
  for (const auto* trainers : {&red, &blue}) ExpectAll(*trainers, "register");
  EXPECT_EQ(daemon.Status().jobs_size(), 2);
  ExpectAll(red, "step");
  red[1]->Kill();
  EXPECT_EQ(red[0]->Do("barrier").reason, "RANK_LOST");
  ExpectAll(blue, "step");
  EXPECT_EQ(daemon.Log().find("crimson"), std::string::npos);
  EXPECT_EQ(daemon.Log().find("azure"), std::string::npos);
}

}  // namespace
}  // namespace gradsync::fault
