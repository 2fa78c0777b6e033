#include "daemon/session/client_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "daemon/base/error.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

// A process that connects to the test and waits to be killed.
class Child {
 public:
  Child() {
    const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    // Without a path the kernel chooses a free abstract name.
    EXPECT_EQ(bind(listener.get(), any, sizeof(sa_family_t)), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    socklen_t length = sizeof(address);
    EXPECT_EQ(getsockname(listener.get(), any, &length), 0);
    pid_ = fork();
    if (pid_ == 0) {
      const int connection = ::socket(AF_UNIX, SOCK_STREAM, 0);
      if (connect(connection, any, length) != 0) _exit(1);
      for (;;) pause();
    }
    socket_ = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  ~Child() {
    if (pid_ > 0) Kill();
  }
  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  pid_t pid() const { return pid_; }
  int socket() const { return socket_.get(); }

 private:
  pid_t pid_ = -1;
  UniqueFd socket_;
};

TEST(ClientProcessTest, HasTheCredentialsOfTheOtherEnd) {
  Child child;
  const auto process = ClientOf(child.socket());
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(process->uid, getuid());
  EXPECT_EQ(process->gid, getgid());
  EXPECT_EQ(process->pid, child.pid());
  ASSERT_NE(process->pidfd, nullptr);
  EXPECT_TRUE(process->pidfd->valid());
}

TEST(ClientProcessTest, PodIsReadFromItsCgroups) {
  Child child;
  pid_t asked = 0;
  const auto process = ClientOf(child.socket(), [&asked](pid_t pid) {
    asked = pid;
    return std::string("0::/kubepods/pod6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60/0123\n");
  });
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(asked, child.pid());
  EXPECT_EQ(process->tenant(), Tenant(getuid(), *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60")));
}

TEST(ClientProcessTest, AnotherUsersProcessIsNotTheClient) {
  Child child;
  EXPECT_TRUE(OpenProcess(child.pid(), getuid()).valid());
  EXPECT_FALSE(OpenProcess(child.pid(), getuid() + 1).valid());
}

TEST(ClientProcessTest, EndIsKnownAfterThePidIsReused) {
  Child child;
  const auto process = ClientOf(child.socket());
  ASSERT_TRUE(process.ok());
  EXPECT_FALSE(HasEnded(*process, /*patience_ms=*/0));
  const pid_t pid = child.pid();
  child.Kill();
  EXPECT_TRUE(HasEnded(*process, /*patience_ms=*/10'000));
  const absl::Status why = ProcessEndedError(*process);
  EXPECT_EQ(DetailsOf(why).reason, "PROCESS_ENDED");
  EXPECT_NE(why.message().find("pid " + std::to_string(pid)), std::string::npos) << why;
}

// Its children may hold the socket. They would be in no pod, and nobody would see them end.
TEST(ClientProcessTest, FailsForAProcessThatHasEnded) {
  Child child;
  child.Kill();
  const auto process = ClientOf(child.socket());
  EXPECT_EQ(process.status().code(), absl::StatusCode::kAborted) << process.status();
}

TEST(ClientProcessTest, EndIsUnknownWithoutAPidfd) {
  ClientProcess process;
  EXPECT_FALSE(HasEnded(process, /*patience_ms=*/0));
}

TEST(ClientProcessTest, FailsForADescriptorThatIsNotASocket) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd in(ends[0]), out(ends[1]);
  EXPECT_FALSE(ClientOf(in.get()).ok());
  EXPECT_FALSE(ClientOf(-1).ok());
}

}  // namespace
}  // namespace gradsync::daemon
