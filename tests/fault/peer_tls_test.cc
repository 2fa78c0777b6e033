// Daemons with TLS: those with the right certificates connect, all others are refused.

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

// Two authorities, each with a certificate for nodes at any loopback address of these tests.
class Certificates {
 public:
  Certificates() {
    std::ofstream(directory_.File("extensions"))
        << "subjectAltName=IP:127.0.0.1,IP:127.0.0.2,IP:127.0.0.3,IP:127.0.0.4,IP:127.0.0.5\n";
    for (const char* authority : {"ours", "theirs"}) {
      const std::string ca = directory_.File(authority);
      const std::string key = " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
      Run(absl::StrCat("openssl req -x509 -days 1 -subj /CN=", authority, key, " -keyout ", ca,
                       ".ca.key -out ", ca, ".ca.pem"));
      Run(absl::StrCat("openssl req -subj /CN=node", key, " -keyout ", ca, ".key -out ", ca,
                       ".csr"));
      Run(absl::StrCat("openssl x509 -req -days 1 -in ", ca, ".csr -CA ", ca, ".ca.pem -CAkey ", ca,
                       ".ca.key -CAcreateserial -extfile ", directory_.File("extensions"), " -out ",
                       ca, ".pem"));
    }
  }

  std::string Path(const std::string& name) const { return directory_.File(name); }
  // Flags for a daemon with a certificate of the authority `shown` that trusts `believed`.
  std::vector<std::string> Flags(const std::string& address, const std::string& shown,
                                 const std::string& believed) const {
    return {"--peer_listen=" + address + ":0",
            "--node_name=node" + address.substr(address.rfind('.') + 1),
            "--peer_tls_certificate=" + Path(shown + ".pem"),
            "--peer_tls_key=" + Path(shown + ".key"),
            "--peer_tls_ca=" + Path(believed + ".ca.pem")};
  }

 private:
  static void Run(const std::string& command) {
    ASSERT_EQ(std::system((command + " 2>/dev/null").c_str()), 0) << command;
  }
  TemporaryDirectory directory_;
};

class PeerTlsTest : public testing::Test {
 protected:
  std::string coordinator() const { return a_.Status().peer_address(); }

  Certificates certificates_;
  TestDaemon a_{certificates_.Flags("127.0.0.1", "ours", "ours")};
};

TEST_F(PeerTlsTest, NodesOfOneAuthorityShareAJob) {
  const TestDaemon b(certificates_.Flags("127.0.0.2", "ours", "ours"));
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(rank == 0 ? a_ : b, rank, 2, "job",
                                                 "coordinator=" + coordinator()));
    trainers.back()->Send(trainers.back()->join());
  }
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    ASSERT_TRUE(reply.ok()) << reply;
  }
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step times=2");
}

// Three daemons are refused: one has a certificate of another authority, one trusts only another
// authority, and one has no certificate.
TEST_F(PeerTlsTest, DaemonsOfAnotherAuthorityAreRefusedInTime) {
  std::vector<std::unique_ptr<TestDaemon>> daemons;
  daemons.push_back(
      std::make_unique<TestDaemon>(certificates_.Flags("127.0.0.3", "theirs", "ours")));
  daemons.push_back(
      std::make_unique<TestDaemon>(certificates_.Flags("127.0.0.4", "ours", "theirs")));
  daemons.push_back(std::make_unique<TestDaemon>(
      std::vector<std::string>{"--peer_listen=127.0.0.5:0", "--node_name=node5"}));
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const auto& daemon : daemons) {
    trainers.push_back(
        std::make_unique<Trainer>(*daemon, 1, 2, "job", "coordinator=" + coordinator()));
    trainers.back()->Send(trainers.back()->join());
  }
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
    EXPECT_EQ(reply.reason, "COORDINATOR_UNREACHABLE") << reply;
    EXPECT_NE(reply.message.find(coordinator()), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("peer_tls"), std::string::npos) << reply;
    EXPECT_LE(reply.end_ns - reply.start_ns, 25'000'000'000ull) << reply;
  }
  EXPECT_EQ(a_.Status().jobs_size(), 0);
}

TEST_F(PeerTlsTest, ClientWithoutACertificateIsRefused) {
  // With TLS 1.2 the handshake fails. With TLS 1.3 only the first read would fail.
  const std::string call = "timeout 20 openssl s_client -tls1_2 -alpn h2 -connect " +
                           coordinator() + " -CAfile " + certificates_.Path("ours.ca.pem");
  const auto shown = [&](const std::string& name) {
    return call + " -cert " + certificates_.Path(name + ".pem") + " -key " +
           certificates_.Path(name + ".key");
  };
  const auto connects = [](const std::string& command) {
    return std::system((command + " < /dev/null > /dev/null 2>&1").c_str()) == 0;
  };
  EXPECT_TRUE(connects(shown("ours")));
  EXPECT_FALSE(connects(call));
  EXPECT_FALSE(connects(shown("theirs")));
}

}  // namespace
}  // namespace gradsync::fault
