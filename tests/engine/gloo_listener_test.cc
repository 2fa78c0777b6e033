// Strangers that connect to the port on which Gloo listens.

#include <dirent.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "gloo/transport/context.h"
#include "gloo/transport/tcp/device.h"

namespace gradsync::daemon {
namespace {

constexpr int kStrangers = 200;

// The addresses on which this process listens.
std::vector<sockaddr_in> Listening() {
  std::vector<sockaddr_in> found;
  DIR* const folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    sockaddr_in address = {};
    size = sizeof(address);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
      found.push_back(address);
    }
  }
  closedir(folder);
  return found;
}

UniqueFd ConnectTo(const sockaddr_in& address) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return socket;
}

// As when a node is killed while the nodes connect.
TEST(GlooListener, ConnectionThatIsResetDoesNotEndTheProcess) {
  gloo::transport::tcp::attr attributes("127.0.0.1");
  const auto device = gloo::transport::tcp::CreateDevice(attributes);
  for (int i = 0; i < kStrangers; ++i) {
    const auto context = device->createContext(/*rank=*/0, /*size=*/2);
    context->setTimeout(std::chrono::seconds(30));
    context->createPair(1);  // listens, and takes the first connection
    const std::vector<sockaddr_in> addresses = Listening();
    ASSERT_EQ(addresses.size(), 1u);
    {
      const UniqueFd stranger = ConnectTo(addresses[0]);
      const linger reset = {1, 0};
      setsockopt(stranger.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!Listening().empty()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "Gloo took no connection";
      std::this_thread::yield();
    }
  }
}

}  // namespace
}  // namespace gradsync::daemon
