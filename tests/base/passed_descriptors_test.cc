#include "daemon/base/passed_descriptors.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

constexpr int kPatienceMs = 30'000;

std::vector<UniqueFd> One(UniqueFd descriptor) {
  std::vector<UniqueFd> descriptors;
  descriptors.push_back(std::move(descriptor));
  return descriptors;
}

// close() of `sender` waits for as long as SO_LINGER says: the receiver reads nothing.
struct FullConnection {
  FullConnection() {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener.get(), name, size), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), name, &size), 0);
    sender = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(sender.get(), name, size), 0);
    receiver = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_TRUE(receiver.valid());
    const std::string bytes(1 << 20, 'x');
    while (send(sender.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
    }
  }

  UniqueFd sender, receiver;
};

TEST(PassedDescriptors, CloseAtOnceDoesNotLinger) {
  FullConnection connection;
  const linger second{1, 1};
  ASSERT_EQ(setsockopt(connection.sender.get(), SOL_SOCKET, SO_LINGER, &second, sizeof(second)), 0);
  CloseAtOnce(One(std::move(connection.sender)));
  // A socket that has lingered ends its connection in order, and the receiver sees no error.
  pollfd error{connection.receiver.get(), 0, 0};
  ASSERT_EQ(poll(&error, 1, kPatienceMs), 1);
  EXPECT_NE(error.revents & POLLERR, 0);
}

TEST(PassedDescriptors, CloseAtOnceClosesWhatIsNoSocket) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd reader(ends[0]);
  CloseAtOnce(One(UniqueFd(ends[1])));
  char byte;
  EXPECT_EQ(read(reader.get(), &byte, 1), 0);
}

}  // namespace
}  // namespace gradsync::daemon
