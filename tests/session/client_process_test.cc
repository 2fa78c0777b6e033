#include "daemon/session/client_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "daemon/base/error.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

// A process that connects to the test and waits to be killed. It makes its end of the connection
// itself, because a Unix socket has the credentials of the process that made it.
class Child {
 public:
  Child() {
    int report[2] = {-1, -1};
    EXPECT_EQ(pipe2(report, O_CLOEXEC), 0);
    int back[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, back), 0);
    pid_ = fork();
    if (pid_ == 0) {
      // The child makes the pair, so both ends have its credentials. It passes one to the test.
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) _exit(1);
      SendDescriptor(back[1], pair[1]);
      for (;;) pause();
    }
    close(back[1]);
    socket_ = UniqueFd(ReceiveDescriptor(back[0]));
    close(back[0]);
    close(report[0]);
    close(report[1]);
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
  union Control {
    char bytes[CMSG_SPACE(sizeof(int))];
    cmsghdr align;
  };
  static void SendDescriptor(int over, int fd) {
    char byte = 0;
    iovec data{&byte, 1};
    Control control{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    *reinterpret_cast<int*>(CMSG_DATA(header)) = fd;
    if (sendmsg(over, &message, 0) != 1) _exit(1);
  }
  static int ReceiveDescriptor(int over) {
    char byte = 0;
    iovec data{&byte, 1};
    Control control{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    EXPECT_EQ(recvmsg(over, &message, MSG_CMSG_CLOEXEC), 1);
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    return header == nullptr ? -1 : *reinterpret_cast<const int*>(CMSG_DATA(header));
  }

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
