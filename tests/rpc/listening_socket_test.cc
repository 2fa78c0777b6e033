#include "daemon/rpc/listening_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

class ListeningSocketTest : public testing::Test {
 protected:
  static sockaddr_un Address(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    return address;
  }
  bool Connects(int type) const {
    const UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    const sockaddr_un address = Address(path_);
    return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  // A killed daemon leaves such a socket: it is bound, and no process listens.
  void LeaveStaleSocket(int type) const {
    const UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    const sockaddr_un address = Address(path_);
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  bool Exists() const {
    struct stat file {};
    return lstat(path_.c_str(), &file) == 0;
  }
  static void ExpectSaid(const absl::Status& status, absl::StatusCode code,
                         std::initializer_list<std::string> parts) {
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : parts) {
      EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << " in: " << status;
    }
  }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_.File("d.sock");
};

TEST_F(ListeningSocketTest, HasItsModeAndRemovesItsPath) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    for (const mode_t mode : {0600u, 0660u, 0666u}) {
      const mode_t umask_before = umask(0077);
      {
        const auto listening = ListeningSocket::Bind(path_, type, mode);
        ASSERT_TRUE(listening.ok()) << listening.status();
        EXPECT_TRUE(Connects(type));
        struct stat file {};
        ASSERT_EQ(lstat(path_.c_str(), &file), 0);
        EXPECT_EQ(file.st_mode & 07777u, mode);
      }
      umask(umask_before);
      EXPECT_FALSE(Exists());
    }
  }
}

TEST_F(ListeningSocketTest, ReplacesTheSocketOfALostDaemon) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    LeaveStaleSocket(type);
    ASSERT_FALSE(Connects(type));
    const auto listening = ListeningSocket::Bind(path_, type, 0600);
    ASSERT_TRUE(listening.ok()) << listening.status();
    EXPECT_TRUE(Connects(type));
  }
}

TEST_F(ListeningSocketTest, RefusesTheSocketOfALiveDaemon) {
  const auto live = ListeningSocket::Bind(path_, SOCK_STREAM, 0600);
  ASSERT_TRUE(live.ok());
  ExpectSaid(ListeningSocket::Bind(path_, SOCK_STREAM, 0600).status(),
             absl::StatusCode::kFailedPrecondition, {"another daemon", path_, "--socket"});
  EXPECT_TRUE(Connects(SOCK_STREAM));
}

TEST_F(ListeningSocketTest, RefusesALiveSocketOfAnotherType) {
  const auto live = ListeningSocket::Bind(path_, SOCK_SEQPACKET, 0600);
  ASSERT_TRUE(live.ok());
  EXPECT_EQ(ListeningSocket::Bind(path_, SOCK_STREAM, 0600).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Connects(SOCK_SEQPACKET));
}

TEST_F(ListeningSocketTest, RefusesALiveSocketWithAFullQueue) {
  // Its queue is full: a connection would wait.
  const UniqueFd busy(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = Address(path_);
  ASSERT_EQ(bind(busy.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(busy.get(), 0), 0);
  const UniqueFd waiting(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(waiting.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
            0);
  ExpectSaid(ListeningSocket::Bind(path_, SOCK_STREAM, 0600).status(),
             absl::StatusCode::kFailedPrecondition, {"another daemon", path_});
}

TEST_F(ListeningSocketTest, MissingDirectoryIsRefused) {
  ExpectSaid(ListeningSocket::Bind(directory_.File("none/d.sock"), SOCK_STREAM, 0600).status(),
             absl::StatusCode::kFailedPrecondition, {"/none/d.sock", "create it", "--socket"});
}

TEST_F(ListeningSocketTest, KeepsAFileThatIsNotASocket) {
  std::ofstream(path_) << "precious";
  ExpectSaid(ListeningSocket::Bind(path_, SOCK_STREAM, 0600).status(),
             absl::StatusCode::kFailedPrecondition, {path_, "is not a socket"});
  std::string content;
  std::ifstream(path_) >> content;
  EXPECT_EQ(content, "precious");
}

TEST_F(ListeningSocketTest, TooLongPathIsRefused) {
  ExpectSaid(ListeningSocket::Bind("/tmp/" + std::string(200, 'x'), SOCK_STREAM, 0600).status(),
             absl::StatusCode::kInvalidArgument, {"205 bytes"});
}

TEST_F(ListeningSocketTest, CheckOfAPathFailsAsABindDoes) {
  std::ofstream(path_) << "precious";
  for (const std::string& path : {path_, directory_.File("none/d.sock"),
                                  directory_.File("d.sock/d.sock"), std::string(200, 'x')}) {
    const absl::Status checked = ListeningSocket::CheckPath(path);
    EXPECT_FALSE(checked.ok()) << path;
    EXPECT_EQ(checked, ListeningSocket::Bind(path, SOCK_STREAM, 0600).status());
  }
}

TEST_F(ListeningSocketTest, CheckOfAPathMakesNothing) {
  EXPECT_TRUE(ListeningSocket::CheckPath(path_).ok());
  EXPECT_FALSE(Exists());
}

TEST_F(ListeningSocketTest, CheckOfAPathLeavesALiveAndALostDaemonsSocket) {
  {
    const auto live = ListeningSocket::Bind(path_, SOCK_STREAM, 0600);
    ASSERT_TRUE(live.ok());
    EXPECT_TRUE(ListeningSocket::CheckPath(path_).ok());
    EXPECT_TRUE(Connects(SOCK_STREAM));
  }
  LeaveStaleSocket(SOCK_STREAM);
  EXPECT_TRUE(ListeningSocket::CheckPath(path_).ok());
  EXPECT_TRUE(Exists());
}

TEST_F(ListeningSocketTest, MoveMovesThePath) {
  auto listening = ListeningSocket::Bind(path_, SOCK_STREAM, 0600);
  ASSERT_TRUE(listening.ok());
  {
    const ListeningSocket moved = *std::move(listening);
    EXPECT_TRUE(Connects(SOCK_STREAM));
  }
  EXPECT_FALSE(Exists());
}

TEST_F(ListeningSocketTest, AdoptedSocketKeepsItsPath) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = Address(path_);
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(fd.get(), 1), 0);
  {
    const ListeningSocket adopted = ListeningSocket::Adopt(fd.release());
    EXPECT_TRUE(Connects(SOCK_STREAM));
  }
  EXPECT_TRUE(Exists());
  EXPECT_FALSE(Connects(SOCK_STREAM));
}

}  // namespace
}  // namespace gradsync::daemon
