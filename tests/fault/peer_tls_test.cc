// Daemons with TLS: those with the right certificates connect, all others are refused.

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Two authorities, each with a certificate for nodes at any loopback address of these tests. The
// file "both" has the authority "ours" and one that is valid for longer.
class Certificates {
 public:
  Certificates() {
    std::ofstream(directory_.File("extensions"))
        << "subjectAltName=IP:127.0.0.1,IP:127.0.0.2,IP:127.0.0.3,IP:127.0.0.4,IP:127.0.0.5\n";
    const std::string key = " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    for (const char* authority : {"ours", "theirs"}) {
      const std::string ca = directory_.File(authority);
      Run(absl::StrCat("openssl req -x509 -days 1 -subj /CN=", authority, key, " -keyout ", ca,
                       ".ca.key -out ", ca, ".ca.pem"));
      Run(absl::StrCat("openssl req -subj /CN=node", key, " -keyout ", ca, ".key -out ", ca,
                       ".csr"));
      Run(absl::StrCat("openssl x509 -req -days 1 -in ", ca, ".csr -CA ", ca, ".ca.pem -CAkey ", ca,
                       ".ca.key -CAcreateserial -extfile ", directory_.File("extensions"), " -out ",
                       ca, ".pem"));
    }
    const std::string next = directory_.File("next");
    Run(absl::StrCat("openssl req -x509 -days 100 -subj /CN=next", key, " -keyout ", next,
                     ".ca.key -out ", next, ".ca.pem"));
    Run(absl::StrCat("cat ", Path("ours.ca.pem"), " ", next, ".ca.pem >", Path("both.ca.pem")));
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
  // The same certificate, its key and the trusted authority.
  std::vector<std::string> Files(const std::string& shown, const std::string& believed) const {
    return {Path(shown + ".pem"), Path(shown + ".key"), Path(believed + ".ca.pem")};
  }

 private:
  static void Run(const std::string& command) {
    ASSERT_EQ(std::system((command + " 2>/dev/null").c_str()), 0) << command;
  }
  TemporaryDirectory directory_;
};

// A process that runs tls_node.cc.
class TlsNode {
 public:
  // The arguments are `first`, then `files`.
  TlsNode(const std::vector<std::string>& first, const std::vector<std::string>& files) {
    int output[2];
    if (pipe2(output, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    result_ = std::make_unique<LineReader>(Descriptor(output[0]));
    const Descriptor child_output(output[1]);
    ChildOptions options;
    options.arguments = {"tests/fault/tls_node"};
    options.arguments.insert(options.arguments.end(), first.begin(), first.end());
    options.arguments.insert(options.arguments.end(), files.begin(), files.end());
    options.output = child_output.get();
    process_ = std::make_unique<ChildProcess>(options);
  }

  std::string Result() { return result_->Next(kPatienceMs).value_or("no answer"); }

 private:
  std::unique_ptr<LineReader> result_;
  std::unique_ptr<ChildProcess> process_;
};

class PeerTlsTest : public testing::Test {
 protected:
  std::string coordinator() const { return a_.Status().peer_address(); }

  Certificates certificates_;
  TestDaemon a_{certificates_.Flags("127.0.0.1", "ours", "ours")};
};

TEST_F(PeerTlsTest, NodesOfOneAuthorityShareAJob) {
  const TestDaemon b(certificates_.Flags("127.0.0.2", "ours", "ours"));
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(rank == 0 ? a_ : b, rank, 2, "job",
                                                 "coordinator=" + coordinator()));
  }
  JoinAll(trainers);
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step times=2");
}

// The certificates of these tests are valid for a day.
TEST_F(PeerTlsTest, WarnsAtStartOfEachFileThatExpiresSoon) {
  const std::string log = a_.Log();
  for (const char* file : {"ours.pem", "ours.ca.pem"}) {
    EXPECT_THAT(log, HasSubstr(absl::StrCat(
                         "certificate expires soon path=", certificates_.Path(file), " expires=")));
  }
}

TEST_F(PeerTlsTest, DoesNotWarnOfAnAuthorityBesideOneThatIsValidForLonger) {
  const TestDaemon b(certificates_.Flags("127.0.0.2", "ours", "both"));
  const std::string log = b.Log();
  EXPECT_THAT(log, HasSubstr("certificate expires soon path=" + certificates_.Path("ours.pem")));
  EXPECT_THAT(log, Not(HasSubstr("path=" + certificates_.Path("both.ca.pem"))));
}

// Three nodes are refused: one has a certificate of another authority, one trusts only another
// authority, and one has no certificate. The fourth has the right one: it shows that a node's
// patience is long enough for a handshake.
TEST_F(PeerTlsTest, NodesOfAnotherAuthorityAreRefusedInTime) {
  TlsNode right({"127.0.0.2:0", coordinator(), "accepted"}, certificates_.Files("ours", "ours"));
  TlsNode refused[] = {
      {{"127.0.0.3:0", coordinator(), "refused"}, certificates_.Files("theirs", "ours")},
      {{"127.0.0.4:0", coordinator(), "refused"}, certificates_.Files("ours", "theirs")},
      {{"127.0.0.5:0", coordinator(), "refused"}, {}}};
  EXPECT_THAT(right.Result(), StartsWith("OK"));
  for (TlsNode& node : refused) {
    EXPECT_THAT(node.Result(), AllOf(StartsWith("UNAVAILABLE COORDINATOR_UNREACHABLE "),
                                     HasSubstr(coordinator()), HasSubstr("peer_tls")));
  }
  const auto status = a_.Status();
  for (const auto& job : status.jobs()) EXPECT_EQ(job.job_id(), "accepted");
}

// The node's certificate is of the right authority, but has other addresses.
TEST_F(PeerTlsTest, OnlyACoordinatorMustHaveItsAddressInItsCertificate) {
  const TestDaemon elsewhere(certificates_.Flags("127.0.0.6", "ours", "ours"));
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(rank == 0 ? a_ : elsewhere, rank, 2, "job",
                                                 "coordinator=" + coordinator()));
  }
  JoinAll(trainers);
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step times=2");
  const Reply refused =
      Trainer(a_, 1, 2, "other",
              "connect_timeout_ms=3000 coordinator=" + elsewhere.Status().peer_address())
          .Join();
  EXPECT_EQ(refused.reason, "COORDINATOR_UNREACHABLE") << refused;
  EXPECT_THAT(refused.message, HasSubstr("peer_tls"));
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
