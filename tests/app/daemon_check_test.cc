#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "daemon/app/daemon.h"
#include "daemon/config/options.h"
#include "daemon/engine/peer_tls_keys.h"
#include "tests/engine/test_certificates.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

class DaemonCheckTest : public testing::Test {
 protected:
  DaemonCheckTest() {
    const PeerTlsKeys& keys = certificates_.keys();
    options_.socket = directory_.File("d.sock");
    options_.peer_listen = "127.0.0.1";
    options_.peer_tls_certificate = Write("peer.crt", keys.certificate);
    options_.peer_tls_key = Write("peer.key", keys.key);
    options_.peer_tls_ca = Write("ca.crt", keys.ca);
  }

  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(directory_.File(name)) << text;
    return directory_.File(name);
  }
  std::string Fault() const { return std::string(Daemon::Check(options_).message()); }

  const TemporaryDirectory directory_;
  const TestCertificates certificates_;
  Options options_;
};

TEST_F(DaemonCheckTest, GoodOptionsPassAndNothingIsMade) {
  EXPECT_EQ(Fault(), "");
  const std::filesystem::directory_iterator files(directory_.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 3);  // ours
}

TEST_F(DaemonCheckTest, NamesTheMissingCertificate) {
  options_.peer_tls_certificate = directory_.File("none.crt");
  EXPECT_EQ(Fault(), "'" + directory_.File("none.crt") + "' cannot be read, or is empty");
}

TEST_F(DaemonCheckTest, RefusesTheKeyOfAnotherCertificate) {
  Write("peer.key", TestCertificates().keys().key);
  EXPECT_EQ(Fault(), "peer_tls_key is not the key of peer_tls_certificate");
}

TEST_F(DaemonCheckTest, FilesThatAStartDoesNotReadDoNotMatter) {
  options_.peer_listen = "";
  options_.peer_tls_ca = directory_.File("none.crt");
  EXPECT_EQ(Fault(), "");
}

TEST_F(DaemonCheckTest, ChecksBothSockets) {
  Write("d-fd.sock", "precious");
  EXPECT_EQ(Fault(), directory_.File("d-fd.sock") +
                         " exists and is not a socket: remove it, or pass another --socket");
  Write("d.sock", "precious");
  EXPECT_EQ(Fault(), directory_.File("d.sock") +
                         " exists and is not a socket: remove it, or pass another --socket");
}

}  // namespace
}  // namespace gradsync::daemon
