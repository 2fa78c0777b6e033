// A daemon that other nodes can reach: what it reports about that, which peers it accepts, and what
// it never logs. Runs outside Bazel's sandbox: inside it root cannot become another user.

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/peer_certificates.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"

namespace gradsync::fault {
namespace {

constexpr char kOpenPort[] = "is open without TLS";
constexpr char kClearText[] = "gradients travel between nodes in clear text";

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PeerExposureTest, ReachablePortWithoutTlsIsAWarning) {
  const TestDaemon daemon({"--peer_listen=0.0.0.0:0", "--peer_plain_text=true"});
  const v1::GetStatusResponse status = daemon.Status();
  ASSERT_EQ(status.warnings_size(), 1);
  EXPECT_TRUE(Contains(status.warnings(0), kOpenPort)) << status.warnings(0);
  ASSERT_EQ(status.notices_size(), 1);
  EXPECT_TRUE(Contains(status.notices(0), kClearText)) << status.notices(0);
  const std::string log = daemon.Log();
  for (const std::string& line : {status.warnings(0), status.notices(0)}) {
    EXPECT_TRUE(Contains(log, "WARNING " + line)) << log;
  }
}

TEST(PeerExposureTest, WithTlsNothingIsLeftToWarnOf) {
  const PeerCertificates certificates;
  std::vector<std::string> flags = certificates.Flags();
  flags.emplace_back("--peer_listen=0.0.0.0:0");
  const TestDaemon daemon(flags);
  const v1::GetStatusResponse status = daemon.Status();
  EXPECT_EQ(status.warnings_size() + status.notices_size(), 0) << status.DebugString();
}

TEST(PeerExposureTest, StatusSaysWhetherGradientsAreEncrypted) {
  const PeerCertificates certificates;
  for (const bool tls : {false, true}) {
    const std::vector<std::string> flags = tls ? certificates.Flags() : std::vector<std::string>();
    const TwoNodes nodes(flags, flags);
    const auto trainers = nodes.Join();
    ExpectAll(trainers, "register buckets=2 count=100000");
    ExpectAll(trainers, "step times=3");
    ExpectAll(trainers, "broadcast 1000000 3");
    EXPECT_EQ(nodes.alpha().Status().jobs(0).engine().encrypted(), tls);
    EXPECT_EQ(nodes.beta().Status().remote_jobs(0).engine().encrypted(), tls);
  }
}

TEST(PeerExposureTest, LoopbackAddressNeedsNoWarning) {
  const TestDaemon daemon({"--peer_listen=127.0.0.1:0"});
  const v1::GetStatusResponse status = daemon.Status();
  EXPECT_EQ(status.warnings_size() + status.notices_size(), 0);
}

TEST(PeerExposureTest, CoordinatorOnEveryAddressFindsAReachableOne) {
  const TestDaemon alpha(
      {"--peer_listen=0.0.0.0:0", "--peer_plain_text=true", "--node_name=alpha"});
  const TestDaemon beta({"--peer_listen=127.0.0.2:0", "--node_name=beta"});
  const std::string listens = alpha.Status().peer_address();
  const std::string coordinator = "coordinator=127.0.0.1" + listens.substr(listens.rfind(':'));
  Trainers trainers;
  trainers.push_back(std::make_unique<Trainer>(alpha, 0, 2, "job", coordinator));
  trainers.push_back(std::make_unique<Trainer>(beta, 1, 2, "job", coordinator));
  JoinAll(trainers);
  ExpectAll(trainers, "register buckets=2 count=1000");
  ExpectAll(trainers, "step times=2");
}

TEST(PeerExposureTest, OnlyNodesWithTheSharedCertificateMeet) {
  const PeerCertificates certificates;
  const TwoNodes nodes(certificates.Flags(), certificates.Flags());
  const auto trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=2 count=1000");
  ExpectAll(trainers, "step times=2");
  // A daemon without a certificate cannot attach.
  const TestDaemon stranger({"--peer_listen=127.0.0.3:0", "--node_name=stranger"});
  Trainer trainer(stranger, 3, 4, "other", "coordinator=" + nodes.coordinator());
  trainer.Begin(trainer.join());
  EXPECT_TRUE(stranger.AwaitStatus([](const auto& now) {
    return now.remote_jobs_size() == 1 && !now.remote_jobs(0).connected();
  }));
  trainer.Kill();
  EXPECT_FALSE(Contains(nodes.alpha().Log(), "node=stranger"));
}

TEST(PeerExposureTest, OnlyListedCoordinatorsAreDialed) {
  const TestDaemon alpha({"--peer_listen=127.0.0.1:0", "--node_name=alpha"});
  const std::string coordinator = alpha.Status().peer_address();
  const std::string port = coordinator.substr(coordinator.rfind(':'));
  const TestDaemon beta({"--peer_listen=127.0.0.2:0", "--node_name=beta",
                         "--peer_coordinators=127.0.0.0/24" + port + ", *.cluster.example"});
  attack::Neighbour neighbour(beta);
  for (const std::string& other :
       {"127.0.1.1" + port, std::string("127.0.0.1:9"), std::string("localhost") + port}) {
    const Reply refused = Trainer(beta, 1, 2, "job", "coordinator=" + other).Join();
    EXPECT_EQ(refused.reason, "COORDINATOR_REFUSED") << other << ": " << refused;
  }
  neighbour.ExpectUnharmed();
  Trainers trainers;
  trainers.push_back(std::make_unique<Trainer>(alpha, 0, 2, "job", "coordinator=" + coordinator));
  trainers.push_back(std::make_unique<Trainer>(beta, 1, 2, "job", "coordinator=" + coordinator));
  JoinAll(trainers);
  ExpectAll(trainers, "register buckets=2 count=1000");
}

TEST(PeerExposureTest, CoordinatorIsAHostAndNoOtherAddress) {
  const TestDaemon alpha({"--peer_listen=127.0.0.1:0"});
  attack::Neighbour neighbour(alpha);
  for (const char* const address : {"unix-abstract:name", "unix:/run/other.sock", "a:b:c"}) {
    const Reply refused = Trainer(alpha, 0, 2, "job", absl::StrCat("coordinator=", address)).Join();
    EXPECT_EQ(refused.reason, "MALFORMED") << address << ": " << refused;
  }
  neighbour.ExpectUnharmed();
}

TEST(PeerExposureTest, TokenIsNeverLogged) {
  const std::vector<std::string> debug = {"--log_level=debug", "--require_token=true"};
  const TwoNodes nodes(debug, debug);
  const auto trainers = nodes.Join(4, "token=accepted-7c1f");
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  // With another token the rank waits for a job of its own. The rank's own node refuses a missing
  // one.
  const auto other = nodes.MakeRank(2, 4, "token=other-93e0");
  ASSERT_TRUE(other->Join().ok());
  const Reply alone = other->Do("register buckets=2 timeout_ms=500");
  EXPECT_EQ(alone.reason, "LAYOUT_TIMEOUT") << alone;
  EXPECT_TRUE(Contains(alone.message, "another token")) << alone;
  EXPECT_FALSE(Contains(alone.message, "93e0")) << alone;
  EXPECT_FALSE(nodes.MakeRank(3, 4)->Join().ok());
  trainers[3]->Kill();
  for (const int rank : {0, 1, 2}) EXPECT_FALSE(trainers[rank]->Do("barrier").ok());
  for (const TestDaemon* daemon : {&nodes.alpha(), &nodes.beta()}) {
    const std::string log = daemon->Log();
    EXPECT_TRUE(Contains(log, "job=job")) << "the log names the job";
    EXPECT_FALSE(Contains(log, "accepted-7c1f")) << log;
    EXPECT_FALSE(Contains(log, "93e0")) << log;
  }
}

}  // namespace
}  // namespace gradsync::fault
