#include "daemon/worker/message_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_error.h"

namespace {

// Whether the next read reports the end, as Linux may do.
bool early_end = false;

// If not -1, the next read fails with ECONNRESET, and leaves this descriptor in the control data,
// as an earlier read may have left it on the stack.
int stale = -1;

void PutDescriptors(const std::vector<int>& descriptors, msghdr* message) {
  message->msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
  cmsghdr* const rights = CMSG_FIRSTHDR(message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size() * sizeof(int));
}

// Sends the bytes with descriptors, also those that no MessageSocket sends.
bool SendRaw(int socket, std::string bytes, const std::vector<int>& descriptors) {
  iovec part{bytes.data(), bytes.size()};
  std::vector<cmsghdr> control(1 + CMSG_SPACE(descriptors.size() * sizeof(int)) / sizeof(cmsghdr));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  PutDescriptors(descriptors, &message);
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// A file that has no other reader than those to whom `reader` was passed.
class PassedPipe {
 public:
  PassedPipe() {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    reader = gradsync::daemon::UniqueFd(ends[0]);
    writer_ = gradsync::daemon::UniqueFd(ends[1]);
  }
  // True if nobody has the reader any more.
  bool HasNoReader() const { return write(writer_.get(), "x", 1) < 0 && errno == EPIPE; }

  gradsync::daemon::UniqueFd reader;

 private:
  gradsync::daemon::UniqueFd writer_;
};

}  // namespace

// Takes the place of the C library's.
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  if (stale >= 0) {
    const std::size_t room = message->msg_controllen;
    PutDescriptors({std::exchange(stale, -1)}, message);
    message->msg_controllen = room;  // Linux changes it only after a read that succeeds
    errno = ECONNRESET;
    return -1;
  }
  if (early_end) {
    early_end = false;
    message->msg_controllen = 0;
    return 0;
  }
  return syscall(SYS_recvmsg, fd, message, flags);
}

namespace gradsync::daemon {
namespace {

TEST(MessageSocket, CarriesMessagesAndDescriptors) {
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  worker::Call call;
  call.set_id(7);
  ASSERT_TRUE(pair->first.Send(call, pipe_ends, MessageSocket::Wait::kYes).ok());
  const auto received = pair->second.Receive();
  ASSERT_TRUE(received.ok());
  worker::Call got;
  ASSERT_TRUE(got.ParseFromString(received->bytes));
  EXPECT_EQ(got.id(), 7u);
  ASSERT_EQ(received->descriptors.size(), 2u);
  struct stat sent;
  struct stat arrived;
  fstat(pipe_ends[0], &sent);
  fstat(received->descriptors[0].get(), &arrived);
  EXPECT_EQ(sent.st_ino, arrived.st_ino);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(MessageSocket, ReportsAClosedOtherEnd) {
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  pair->second.Release().reset();
  worker::Call call;
  call.set_id(1);
  EXPECT_EQ(pair->first.Send(call, {}, MessageSocket::Wait::kYes).code(),
            absl::StatusCode::kUnavailable);
  const auto received = pair->first.Receive();
  ASSERT_TRUE(received.ok());
  EXPECT_TRUE(received->end);
}

// Linux may report the end although a message has come: if both come while it looks.
TEST(MessageSocket, LastMessageBeforeTheEndIsNeverLost) {
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  worker::Call call;
  call.set_id(7);
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int passed = file.get();
  ASSERT_TRUE(pair->first.Send(call, {passed}, MessageSocket::Wait::kYes).ok());
  pair->first.Release().reset();
  early_end = true;
  const auto received = pair->second.Receive();
  EXPECT_FALSE(early_end) << "nothing was read";
  ASSERT_TRUE(received.ok());
  EXPECT_FALSE(received->end);
  EXPECT_EQ(received->bytes, call.SerializeAsString());
  EXPECT_EQ(received->descriptors.size(), 1u);
  const auto last = pair->second.Receive();
  ASSERT_TRUE(last.ok());
  EXPECT_TRUE(last->end);
}

TEST(MessageSocket, ClosesTheDescriptorsOfAnEmptyMessage) {
  signal(SIGPIPE, SIG_IGN);
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  PassedPipe passed;
  ASSERT_TRUE(SendRaw(pair->first.fd(), "", {passed.reader.get()}));
  passed.reader.reset();
  worker::Call call;
  call.set_id(7);
  ASSERT_TRUE(pair->first.Send(call, {}, MessageSocket::Wait::kYes).ok());
  const auto received = pair->second.Receive();
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(received->bytes, call.SerializeAsString());
  EXPECT_TRUE(received->descriptors.empty()) << "they came with another message";
  EXPECT_TRUE(passed.HasNoReader());
}

TEST(MessageSocket, RefusesAMessageWithTooManyDescriptorsAndClosesAll) {
  signal(SIGPIPE, SIG_IGN);
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  PassedPipe passed;
  const std::vector<int> many(MessageSocket::kMaxDescriptors + 1, passed.reader.get());
  ASSERT_TRUE(SendRaw(pair->first.fd(), "x", many));
  passed.reader.reset();
  EXPECT_EQ(pair->second.Receive().status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(passed.HasNoReader());
}

// The other end has ended with messages that it has not read. The daemon may have another file
// under the number of a descriptor that came long ago.
TEST(MessageSocket, TakesNoDescriptorFromAReadThatFails) {
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  UniqueFd other(open("/dev/null", O_RDONLY | O_CLOEXEC));
  stale = other.get();
  {
    const auto received = pair->second.Receive();
    EXPECT_EQ(stale, -1) << "nothing was read";
    ASSERT_TRUE(received.ok());
    EXPECT_TRUE(received->end);
    EXPECT_TRUE(received->descriptors.empty());
  }
  EXPECT_GE(fcntl(other.get(), F_GETFD), 0) << "it was closed";
}

TEST(MessageSocket, SendWithoutWaitNeverBlocks) {
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  worker::Call call;
  call.set_id(1);
  absl::Status status;
  for (int i = 0; i < 100'000 && status.ok(); ++i) {
    status = pair->first.Send(call, {}, MessageSocket::Wait::kNo);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

TEST(MessageSocket, RefusesMessagesThatAreTooLarge) {
  auto pair = MessageSocket::Pair();
  ASSERT_TRUE(pair.ok());
  worker::Call call;
  call.mutable_start()->set_device(std::string(MessageSocket::kMaxMessageBytes, 'x'));
  EXPECT_EQ(pair->first.Send(call, {}, MessageSocket::Wait::kYes).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(WorkerError, DecodesWhatWasEncoded) {
  const absl::Status sent = MakeError(absl::StatusCode::kUnavailable, reason::kGpuFault, "why",
                                      {{field::kDevice, "GPU-1"}, {field::kError, "E"}});
  const absl::Status got = DecodeError(EncodeError(sent));
  EXPECT_EQ(got, sent);
  EXPECT_EQ(DetailsOf(got).fields, DetailsOf(sent).fields);
  EXPECT_EQ(DecodeError(EncodeError(absl::NotFoundError("x"))), absl::NotFoundError("x"));
}

}  // namespace
}  // namespace gradsync::daemon
