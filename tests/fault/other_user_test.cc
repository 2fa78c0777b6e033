// Users of one node cannot reach each other's jobs. Runs outside Bazel's sandbox: inside it root
// cannot become another user.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/raw_session.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

constexpr const char* kOther = "become 12345";

class OtherUser : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    ASSERT_EQ(chmod(daemon_.directory().path().c_str(), 0755), 0);
  }
  // Gives the sockets to a group that the other user is in.
  static void LetIn(const TestDaemon& daemon) {
    for (const std::string& socket : {daemon.socket(), daemon.side_socket()}) {
      ASSERT_EQ(chown(socket.c_str(), 0, 12345), 0);
    }
  }
  TestDaemon daemon_;
};

TEST_F(OtherUser, GetsAnErrorThatNamesTheGroupThatItIsNotIn) {
  Trainer trainer(daemon_, 0, 1);
  ASSERT_TRUE(trainer.Do(kOther).ok());
  const Reply reply = trainer.Join();
  EXPECT_EQ(reply.code, "PERMISSION_DENIED") << reply;
  EXPECT_EQ(reply.reason, "CREDENTIALS") << reply;
  EXPECT_NE(reply.message.find("as user id 12345"), std::string::npos) << reply;
  EXPECT_NE(reply.message.find("group root"), std::string::npos) << reply;
}

TEST_F(OtherUser, HasASeparateJobOfTheSameId) {
  LetIn(daemon_);
  const auto mine = JoinedTrainers(daemon_, 2);
  ExpectAll(mine, "register");
  Trainers theirs;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    theirs.push_back(std::make_unique<Trainer>(daemon_, rank, 2));
    ASSERT_TRUE(theirs[rank]->Do(kOther).ok());
    theirs[rank]->Send(theirs[rank]->join());
  }
  for (const auto& trainer : theirs) {
    const Reply reply = trainer->Receive();
    ASSERT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("generation"), "1") << "a separate job, not the next generation";
  }
  ExpectAll(theirs, "register count=500");
  ExpectAll(theirs, "step times=2");
  ExpectAll(mine, "step times=3");

  EXPECT_EQ(theirs[0]->Do("jobs socket=" + daemon_.socket()).Field("jobs"), "job/12345/2");
  // Root sees both.
  EXPECT_EQ(daemon_.Status().jobs_size(), 2);

  // A lost rank of one user does not affect the other user's job.
  theirs[1]->Kill();
  EXPECT_EQ(theirs[0]->Do("barrier").reason, "RANK_LOST");
  ExpectAll(mine, "step");
}

TEST_F(OtherUser, CannotClaimANonceOfAnotherUser) {
  LetIn(daemon_);
  RawSession owner(daemon_.socket());
  ASSERT_TRUE(owner.Open(0, 1, "job").has_value());
  const auto assigned = owner.Register(RawSession::LayoutRequest(1, 10));
  ASSERT_TRUE(assigned.has_value());
  Trainer thief(daemon_, 0, 1);
  ASSERT_TRUE(thief.Do(kOther).ok());
  const Reply stolen = thief.Do("claim " + absl::BytesToHexString(assigned->nonce()) +
                                " socket=" + daemon_.side_socket());
  EXPECT_EQ(stolen.code, "PERMISSION_DENIED") << stolen;
  EXPECT_EQ(stolen.Field("descriptors"), "0");
  EXPECT_NE(owner.Map(*assigned, daemon_.side_socket()), nullptr) << "the owner can still claim it";
}

// Each such connection takes time of the thread that accepts those of all users.
TEST_F(OtherUser, IsRefusedIfItAsksForMemoryInVainTooOften) {
  const TestDaemon daemon({"--quota_sessions_per_user=1"});
  ASSERT_EQ(chmod(daemon.directory().path().c_str(), 0755), 0);
  LetIn(daemon);
  Trainer member(daemon, 0, 1), asker(daemon, 0, 1);
  ASSERT_TRUE(member.Do(kOther).ok());
  ASSERT_TRUE(member.Join().ok());
  ASSERT_TRUE(asker.Do(kOther).ok());
  const std::string claim =
      "claim " + std::string(2 * kNonceBytes, '0') + " socket=" + daemon.side_socket();
  Reply reply = asker.Do(claim);
  ASSERT_EQ(reply.code, "NOT_FOUND") << reply;
  for (int times = 0; times < 1000 && reply.code == "NOT_FOUND"; ++times) reply = asker.Do(claim);
  EXPECT_EQ(reply.code, "UNKNOWN") << reply << ": the daemon answers no more";
  EXPECT_NE(daemon.Log().find("connects too often"), std::string::npos) << daemon.Log();
  const v1::GetStatusResponse status = daemon.Status();
  const auto user = std::find_if(status.users().begin(), status.users().end(),
                                 [](const v1::UserMemory& one) { return one.uid() == 12345; });
  ASSERT_NE(user, status.users().end()) << status.DebugString();
  EXPECT_EQ(user->connections(), 1u) << "that of its trainer";
  EXPECT_GT(user->connections_refused(), 0u);
  RawSession owner(daemon.socket());
  ASSERT_TRUE(owner.Open(0, 1, "job").has_value());
  const auto assigned = owner.Register(RawSession::LayoutRequest(1, 10));
  ASSERT_TRUE(assigned.has_value());
  EXPECT_NE(owner.Map(*assigned, daemon.side_socket()), nullptr) << "another user gets its memory";
}

// ---- Without TLS on the peer port

class OtherUsersDaemon : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can start a daemon of another user";
  }
  // It may write to this test's folders, and nothing else.
  const std::vector<std::string> kAsOther = {"/usr/bin/setpriv", "--reuid=12345", "--clear-groups",
                                             "--inh-caps=-all,+dac_override",
                                             "--ambient-caps=-all,+dac_override"};
};

// Otherwise any local process could join, and supersede, the job of any user.
TEST_F(OtherUsersDaemon, IsRefusedAsAnAgentWithoutTls) {
  const TwoNodes nodes;
  const auto trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=2 count=1000");
  const TestDaemon stranger({"--peer_listen=127.0.0.3:0", "--node_name=stranger"}, {}, kAsOther);
  Trainer attacker(stranger, 3, 4, "job", "coordinator=" + nodes.coordinator());
  const Reply refused = attacker.Join();
  EXPECT_EQ(refused.code, "PERMISSION_DENIED") << refused;
  EXPECT_EQ(refused.reason, "PEER_REFUSED") << refused;
  EXPECT_TRUE(absl::StrContains(refused.message, "user 12345")) << refused;
  ExpectAll(trainers, "step times=2");
}

// Otherwise a trainer could name a coordinator of its own, which tells this daemon what to do.
TEST_F(OtherUsersDaemon, IsRefusedAsACoordinatorWithoutTls) {
  const TestDaemon stranger({"--peer_listen=127.0.0.3:0", "--node_name=stranger"}, {}, kAsOther);
  const TestDaemon alpha({"--peer_listen=127.0.0.1:0", "--node_name=alpha"});
  attack::Neighbour neighbour(alpha);
  Trainer attacker(alpha, 0, 2, "job", "coordinator=" + stranger.Status().peer_address());
  const Reply refused = attacker.Join();
  EXPECT_EQ(refused.code, "PERMISSION_DENIED") << refused;
  EXPECT_EQ(refused.reason, "COORDINATOR_REFUSED") << refused;
  EXPECT_TRUE(absl::StrContains(refused.message, "user 12345")) << refused;
  neighbour.ExpectUnharmed();
}

}  // namespace
}  // namespace gradsync::fault
