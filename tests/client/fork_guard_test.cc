#include "client/src/fork_guard.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/include/gradsync/client.h"
#include "client/src/unix_socket.h"
#include "gtest/gtest.h"
#include "tests/kit/in_child.h"

namespace gradsync::client {
namespace {

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

struct Pair {
  Pair() {
    int both[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, both), 0);
    near = FileDescriptor(both[0]);
    far = FileDescriptor(both[1]);
  }
  FileDescriptor near, far;
};

TEST(ForkGuardTest, ChildLosesOnlyGuardedSockets) {
  Pair pair;
  auto guard = GuardedSocket::Guard(pair.near.get());
  ASSERT_TRUE(guard.ok()) << guard.status();
  EXPECT_EQ(
      InChild([&] { return (IsOpen(pair.near.get()) ? 1 : 0) | (IsOpen(pair.far.get()) ? 0 : 2); }),
      0);
  EXPECT_TRUE(IsOpen(pair.near.get()));
}

TEST(ForkGuardTest, OtherSideSeesTheParentsEndWhileAChildLives) {
  Pair pair;
  auto guard = GuardedSocket::Guard(pair.near.get());
  ASSERT_TRUE(guard.ok());
  int hold[2];
  ASSERT_EQ(pipe(hold), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(hold[1]);
    char byte;
    _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);
  }
  *guard = GuardedSocket();
  pair.near = FileDescriptor();
  char byte;
  EXPECT_EQ(read(pair.far.get(), &byte, 1), 0);  // end of stream
  close(hold[0]);
  close(hold[1]);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST(ForkGuardTest, OnlyTheChildKnowsThatItIsForked) {
  Pair pair;
  auto guard = GuardedSocket::Guard(pair.near.get());
  ASSERT_TRUE(guard.ok());
  EXPECT_EQ(InChild([] { return InForkedChild() ? 0 : 1; }), 0);
  EXPECT_FALSE(InForkedChild());
}

TEST(ForkGuardTest, ReleasedSocketIsNotClosed) {
  Pair pair;
  {
    auto guard = GuardedSocket::Guard(pair.near.get());
    ASSERT_TRUE(guard.ok());
  }
  EXPECT_EQ(InChild([&] { return IsOpen(pair.near.get()) ? 0 : 1; }), 0);
}

// gRPC closes its socket when the daemon ends. At the time of the fork the number may belong to
// another file.
TEST(ForkGuardTest, ReusedDescriptorIsNotClosed) {
  Pair pair;
  auto guard = GuardedSocket::Guard(pair.near.get());
  ASSERT_TRUE(guard.ok());
  const int number = pair.near.get();
  Pair other;
  ASSERT_EQ(dup2(other.near.get(), number), number);
  EXPECT_EQ(InChild([number] { return IsOpen(number) ? 0 : 1; }), 0);
}

TEST(ForkGuardTest, JoinInAChildFails) {
  Pair pair;
  auto guard = GuardedSocket::Guard(pair.near.get());
  ASSERT_TRUE(guard.ok());
  EXPECT_EQ(InChild([] {
              SessionOptions options;
              options.job_id = "j";
              const auto session = Session::Join(options);
              return session.status().code() == absl::StatusCode::kFailedPrecondition &&
                             ErrorReason(session.status()) == "FORKED"
                         ? 0
                         : 1;
            }),
            0);
}

TEST(ForkGuardTest, GrandchildrenAreInert) {
  Pair pair;
  auto guard = GuardedSocket::Guard(pair.near.get());
  ASSERT_TRUE(guard.ok());
  EXPECT_EQ(InChild([] { return InChild([] { return InForkedChild() ? 7 : 1; }); }), 7);
}

}  // namespace
}  // namespace gradsync::client
