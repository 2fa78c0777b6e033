#include "daemon/worker/message_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/error.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_error.h"

namespace {

// Whether the next read reports the end, as Linux may do.
bool early_end = false;

}  // namespace

// Takes the place of the C library's.
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
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
