#include "client/src/fd_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "client/include/gradsync/client.h"
#include "gmock/gmock.h"
#include "gradsync/shared_memory.h"
#include "gtest/gtest.h"
#include "tests/kit/obey_permissions.h"
#include "tests/kit/soon.h"
#include "tests/kit/temporary_directory.h"
#include "tests/kit/thread_sleep.h"

namespace {

// Whether a read that finds nothing waits for the hang-up and reports the end, as Linux may do.
bool early_end = false;
// Whether a read finds no free file descriptor.
bool no_open_files = false;

}  // namespace

// Takes the place of the C library's, for this test's thread.
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  rlimit limit{}, none{};
  getrlimit(RLIMIT_NOFILE, &limit);
  none.rlim_max = limit.rlim_max;
  if (no_open_files) setrlimit(RLIMIT_NOFILE, &none);
  const ssize_t received = syscall(SYS_recvmsg, fd, message, flags);
  if (no_open_files) setrlimit(RLIMIT_NOFILE, &limit);
  if (!early_end || received >= 0 || errno != EAGAIN) return received;
  pollfd hung_up{fd, POLLRDHUP, 0};
  poll(&hung_up, 1, -1);
  return 0;
}

namespace gradsync::client {
namespace {

using testing::HasSubstr;

constexpr char kNonce[] = "0123456789abcdef";

// Answers requests as a test says.
class FdSocketTest : public testing::Test {
 protected:
  void Serve(FdReply reply, int descriptors, std::size_t bytes = sizeof(FdReply),
             int requests = 1) {
    listener_ = FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    ASSERT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(listener_.get(), 1), 0);
    server_ = std::thread([=] {
      for (int i = 0; i < requests; ++i) Answer(reply, descriptors, bytes);
    });
  }

  ~FdSocketTest() override {
    if (server_.joinable()) server_.join();
  }

  void Answer(FdReply reply, int descriptors, std::size_t bytes) {
    const FileDescriptor client(accept(listener_.get(), nullptr, nullptr));
    if (recv(client.get(), &request_, sizeof(request_), 0) != sizeof(request_)) return;
    const FileDescriptor file(open("/dev/null", O_RDONLY | O_CLOEXEC));
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    iovec part{&reply, bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (descriptors > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
      for (int i = 0; i < descriptors; ++i) {
        const int fd = file.get();
        std::memcpy(CMSG_DATA(header) + i * sizeof(int), &fd, sizeof(int));
      }
    }
    sendmsg(client.get(), &message, MSG_NOSIGNAL);
  }

  absl::StatusOr<std::vector<FileDescriptor>> Fetch(std::size_t count) {
    return FetchDescriptors(path_, kNonce, count, absl::Now() + absl::Seconds(20));
  }

  TemporaryDirectory directory_;
  const std::string path_ = directory_.File("x-fd.sock");
  FileDescriptor listener_;
  std::thread server_;
  FdRequest request_;
};

TEST_F(FdSocketTest, FetchesDescriptors) {
  FdReply reply;
  reply.fd_count = 2;
  Serve(reply, 2);
  const auto fetched = Fetch(2);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  ASSERT_EQ(fetched->size(), 2u);
  for (const FileDescriptor& descriptor : *fetched) {
    EXPECT_EQ(fcntl(descriptor.get(), F_GETFD), FD_CLOEXEC);
  }
  server_.join();
  EXPECT_EQ(request_.magic, kFdMagic);
  EXPECT_EQ(request_.abi, kSharedMemoryAbi);
  EXPECT_EQ(std::memcmp(request_.nonce, kNonce, kNonceBytes), 0);
}

// Linux may report the end although an answer has come: if that and the hang-up come while it
// looks.
TEST_F(FdSocketTest, AnswerBeforeAHangUpIsNeverLost) {
  constexpr int kRequests = 100;
  FdReply reply;
  Serve(reply, 0, sizeof(reply), kRequests);
  early_end = true;
  for (int i = 0; i < kRequests; ++i) {
    const auto fetched = Fetch(0);
    EXPECT_TRUE(fetched.ok()) << fetched.status();
  }
  early_end = false;
}

TEST_F(FdSocketTest, TooManyOpenFilesAreNamed) {
  FdReply reply;
  reply.fd_count = 2;
  Serve(reply, 2);
  no_open_files = true;
  const absl::Status status = Fetch(2).status();
  no_open_files = false;
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(ErrorReason(status), "OPEN_FILES");
  EXPECT_THAT(status.message(), HasSubstr("ulimit -n"));
}

TEST_F(FdSocketTest, RefusalHasTheDaemonsReason) {
  FdReply reply;
  reply.status = static_cast<std::uint32_t>(absl::StatusCode::kPermissionDenied);
  std::strcpy(reply.message, "the nonce has been used");
  Serve(reply, 0);
  const auto fetched = Fetch(2);
  EXPECT_EQ(fetched.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(fetched.status().message()), HasSubstr("the nonce has been used"));
}

TEST_F(FdSocketTest, RefusesTheWrongNumberOfDescriptors) {
  FdReply reply;
  reply.fd_count = 2;
  Serve(reply, 1);
  EXPECT_EQ(Fetch(2).status().code(), absl::StatusCode::kInternal);
}

TEST_F(FdSocketTest, RefusesTooManyDescriptors) {
  FdReply reply;
  reply.fd_count = 8;
  Serve(reply, 8);
  EXPECT_EQ(Fetch(8).status().code(), absl::StatusCode::kInternal);
}

TEST_F(FdSocketTest, RefusesAForeignAnswer) {
  FdReply reply;
  reply.magic = 1;
  reply.fd_count = 1;
  Serve(reply, 1);
  EXPECT_EQ(Fetch(1).status().code(), absl::StatusCode::kInternal);
}

TEST_F(FdSocketTest, RefusesAShortAnswer) {
  Serve(FdReply(), 0, 12);
  EXPECT_EQ(Fetch(0).status().code(), absl::StatusCode::kInternal);
}

TEST_F(FdSocketTest, NobodyListensIsUnavailable) {
  FileDescriptor client;
  ASSERT_TRUE(OpenUnixSocket(SOCK_SEQPACKET, &client).ok());
  const absl::Status connected = ConnectUnixSocket(client, path_, Absent::kNotYet, absl::Now());
  EXPECT_EQ(connected.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(connected.message()), HasSubstr(path_));
  EXPECT_THAT(std::string(connected.message()), HasSubstr("start gradsyncd"));
}

// The daemon listened when it gave the nonce. If it does not listen now, it is lost.
TEST_F(FdSocketTest, LostDaemonFailsAtOnce) {
  const auto fetched = FetchDescriptors(path_, kNonce, 1, absl::InfiniteFuture());
  EXPECT_EQ(fetched.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(fetched.status().message()), HasSubstr("the daemon was lost"));
}

TEST_F(FdSocketTest, RefusesANonceOfAnotherLength) {
  EXPECT_EQ(FetchDescriptors(path_, "short", 1, absl::Now()).status().code(),
            absl::StatusCode::kInternal);
}

// A daemon in a sidecar may start late.
TEST_F(FdSocketTest, ConnectRetriesUntilDaemonListens) {
  FileDescriptor client;
  ASSERT_TRUE(OpenUnixSocket(SOCK_SEQPACKET, &client).ok());
  absl::Status connected = absl::UnknownError("");
  std::thread connecting([&] {
    connected = ConnectUnixSocket(client, path_, Absent::kNotYet, absl::Now() + absl::Seconds(20));
  });
  FdReply reply;
  reply.fd_count = 0;
  Serve(reply, 0);
  connecting.join();
  EXPECT_TRUE(connected.ok()) << connected;
  FdRequest request;
  EXPECT_EQ(send(client.get(), &request, sizeof(request), 0),
            static_cast<ssize_t>(sizeof(request)));
}

// Listens at a path, and accepts nobody by itself. The kernel keeps one connection that waits to be
// accepted: that of `first`.
class FullQueue {
 public:
  explicit FullQueue(const std::string& path) {
    EXPECT_TRUE(OpenUnixSocket(SOCK_STREAM, &listener_).ok());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
    EXPECT_EQ(listen(listener_.get(), 0), 0);
    EXPECT_TRUE(OpenUnixSocket(SOCK_STREAM, &first_).ok());
    EXPECT_TRUE(ConnectUnixSocket(first_, path, Absent::kLost, absl::Now()).ok());
  }
  void Accept() { EXPECT_GE(FileDescriptor(accept(listener_.get(), nullptr, nullptr)).get(), 0); }

 private:
  FileDescriptor listener_, first_;
};

// Whether the thread is in connect(2).
bool IsInConnect(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/syscall");
  long call = -1;
  return file >> call && call == SYS_connect;
}

TEST_F(FdSocketTest, ConnectSaysThatTheDaemonAcceptsNobody) {
  const FullQueue queue(path_);
  FileDescriptor client;
  ASSERT_TRUE(OpenUnixSocket(SOCK_STREAM, &client).ok());
  const absl::Time start = absl::Now();
  const absl::Status connected =
      ConnectUnixSocket(client, path_, Absent::kLost, start + absl::Milliseconds(50));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(50));
  EXPECT_EQ(connected.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReason(connected), "DAEMON_LOST");
  EXPECT_THAT(std::string(connected.message()), HasSubstr("accepted no connection within"));
}

// It waits in the kernel: whoever tries now and then finds no place in a queue that others keep
// full.
TEST_F(FdSocketTest, ConnectWaitsForAPlaceInTheQueue) {
  FullQueue queue(path_);
  FileDescriptor client;
  ASSERT_TRUE(OpenUnixSocket(SOCK_STREAM, &client).ok());
  std::atomic<pid_t> thread{0};
  absl::Status connected = absl::UnknownError("");
  std::thread connecting([&] {
    thread = ThisThread();
    connected = ConnectUnixSocket(client, path_, Absent::kLost, absl::InfiniteFuture());
  });
  EXPECT_TRUE(Soon([&] { return thread != 0 && IsInConnect(thread); }));
  queue.Accept();
  connecting.join();
  EXPECT_TRUE(connected.ok()) << connected;
  EXPECT_NE(fcntl(client.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(FdSocketTest, DeniedConnectNamesTheGroup) {
  if (geteuid() == 0) {
    GTEST_SKIP() << "root may connect to every socket";
  }
  Serve(FdReply(), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0), 0);
  const auto fetched = Fetch(1);
  EXPECT_EQ(fetched.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrorReason(fetched.status()), "CREDENTIALS");
  EXPECT_THAT(std::string(fetched.status().message()), HasSubstr("group"));
  ASSERT_EQ(chmod(path_.c_str(), 0700), 0);
  FileDescriptor client;
  ASSERT_TRUE(OpenUnixSocket(SOCK_SEQPACKET, &client).ok());
  ASSERT_TRUE(ConnectUnixSocket(client, path_, Absent::kNotYet, absl::Now()).ok());
}

TEST_F(FdSocketTest, FolderThatHidesTheSocketIsNamedWithItsGroup) {
  FileDescriptor client;
  ASSERT_TRUE(OpenUnixSocket(SOCK_SEQPACKET, &client).ok());
  ASSERT_EQ(chmod(directory_.path().c_str(), 0010), 0);
  absl::Status connected;
  std::thread connecting([&] {
    ObeyPermissions();
    connected = ConnectUnixSocket(client, path_, Absent::kNotYet, absl::Now());
  });
  connecting.join();
  EXPECT_EQ(chmod(directory_.path().c_str(), 0700), 0);
  EXPECT_EQ(connected.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrorReason(connected), "CREDENTIALS");
  const std::string message(connected.message());
  EXPECT_THAT(message, HasSubstr("its folder " + directory_.path() + " belongs to group"));
  EXPECT_THAT(message, HasSubstr("usermod --append --groups"));
}

}  // namespace
}  // namespace gradsync::client
