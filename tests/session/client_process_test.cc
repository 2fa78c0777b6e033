#include "daemon/session/client_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "daemon/base/error.h"
#include "daemon/base/unique_fd.h"
#include "tests/kit/forked_child.h"

namespace gradsync::daemon {
namespace {

// A process that is connected to the test.
class ConnectedChild {
 public:
  ConnectedChild() : child_([this] { Connect(); }) {
    socket_ = UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  void Kill() { child_.Kill(); }
  pid_t pid() const { return child_.pid(); }
  int socket() const { return socket_.get(); }

 private:
  UniqueFd Listen() {
    UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    address_.sun_family = AF_UNIX;
    auto* const any = reinterpret_cast<sockaddr*>(&address_);
    // Without a path the kernel chooses a free abstract name.
    EXPECT_EQ(bind(listener.get(), any, sizeof(sa_family_t)), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), any, &address_bytes_), 0);
    return listener;
  }
  void Connect() const {
    const int connection = ::socket(AF_UNIX, SOCK_STREAM, 0);
    const auto* const any = reinterpret_cast<const sockaddr*>(&address_);
    if (connect(connection, any, address_bytes_) != 0) _exit(1);
  }

  sockaddr_un address_{};
  socklen_t address_bytes_ = sizeof(address_);
  const UniqueFd listener_ = Listen();
  ForkedChild child_;
  UniqueFd socket_;
};

TEST(ClientProcessTest, HasTheCredentialsOfTheOtherEnd) {
  ConnectedChild child;
  const auto process = ClientOf(child.socket());
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(process->uid, getuid());
  EXPECT_EQ(process->gid, getgid());
  EXPECT_EQ(process->pid, child.pid());
  ASSERT_NE(process->pidfd, nullptr);
  EXPECT_TRUE(process->pidfd->valid());
}

TEST(ClientProcessTest, PodIsReadFromItsCgroups) {
  ConnectedChild child;
  pid_t asked = 0;
  const auto process = ClientOf(child.socket(), [&asked](pid_t pid) {
    asked = pid;
    return std::string("0::/kubepods/pod6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60/0123\n");
  });
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(asked, child.pid());
  EXPECT_EQ(process->tenant(), Tenant(getuid(), *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60")));
}

// Otherwise it would pass for a process outside of pods, whose quotas are others.
TEST(ClientProcessTest, ItIsNobodyWhileDescriptorsHaveRunOut) {
  ConnectedChild child;
  const auto process = ClientOf(child.socket(), [](pid_t) {
    return absl::StatusOr<std::string>(absl::ErrnoToStatus(EMFILE, "/proc/PID/cgroup"));
  });
  EXPECT_TRUE(absl::IsResourceExhausted(process.status())) << process.status();
}

TEST(ClientProcessTest, AnotherUsersProcessIsNotTheClient) {
  ConnectedChild child;
  EXPECT_TRUE(OpenProcess(child.pid(), getuid()).valid());
  EXPECT_FALSE(OpenProcess(child.pid(), getuid() + 1).valid());
}

TEST(ClientProcessTest, EndIsKnownAfterThePidIsReused) {
  ConnectedChild child;
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
  ConnectedChild child;
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
