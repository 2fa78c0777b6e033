#include "daemon/peer/peer_listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/logging.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/session/descriptor_quota.h"
#include "tests/kit/deadline.h"
#include "tests/kit/soon.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

PeerAddress Loopback(std::uint16_t port) {
  PeerAddress address;
  address.host = "127.0.0.1";
  address.port = port;
  return address;
}

// Counts what the listener has accepted, and keeps it.
class Accepted {
 public:
  void Add(UniqueFd connection) {
    MutexLock lock(&mutex_);
    connections_.push_back(std::move(connection));
    changed_.NotifyAll();
  }
  bool Await(std::size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
    MutexLock lock(&mutex_);
    while (connections_.size() < count) {
      if (!changed_.WaitUntil(&mutex_, deadline)) return false;
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<UniqueFd> connections_ ABSL_GUARDED_BY(mutex_);
};

// What the daemon logs from now on.
class LogLines {
 public:
  LogLines() {
    LogOptions log;
    log.file = directory_.File("log");
    EXPECT_TRUE(InitLogging(log).ok());
    lines_ = UniqueFd(open(log.file.c_str(), O_RDONLY | O_CLOEXEC));
  }
  // Waits until the log has the text.
  bool Say(const std::string& text) {
    return Soon([&] {
      ReadMore();
      return said_.find(text) != std::string::npos;
    });
  }
  // How often the log has the text. Nobody logs any more.
  int Count(const std::string& text) {
    FlushLogging();
    while (ReadMore()) {
    }
    int count = 0;
    for (auto at = said_.find(text); at != std::string::npos; at = said_.find(text, at + 1)) {
      ++count;
    }
    return count;
  }
  const std::string& said() const { return said_; }

 private:
  bool ReadMore() {
    char bytes[4096];
    const ssize_t size = read(lines_.get(), bytes, sizeof(bytes));
    if (size > 0) said_.append(bytes, static_cast<std::size_t>(size));
    return size > 0;
  }

  const TemporaryDirectory directory_;
  UniqueFd lines_;
  std::string said_;
};

std::atomic<int> signals_handled{0};

// A signal ends the system call in which the thread waits. Sends many, one after the other.
void Interrupt(pthread_t thread) {
  struct sigaction count {};
  count.sa_handler = [](int) { ++signals_handled; };
  ASSERT_EQ(sigaction(SIGUSR1, &count, nullptr), 0);
  for (int i = 0; i < 100; ++i) {
    const int handled = signals_handled.load();
    ASSERT_EQ(pthread_kill(thread, SIGUSR1), 0);
    ASSERT_TRUE(Soon([&] { return signals_handled.load() > handled; }));
  }
}

UniqueFd MakeSocket() { return UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

bool Connect(const UniqueFd& socket, std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

TEST(PeerListenerTest, PassesConnectionsOn) {
  auto listener = PeerListener::Listen(Loopback(0));
  ASSERT_TRUE(listener.ok()) << listener.status();
  ASSERT_NE((*listener)->port(), 0);
  Accepted accepted;
  (*listener)->Start([&](UniqueFd connection) { accepted.Add(std::move(connection)); });
  const UniqueFd one = MakeSocket(), two = MakeSocket();
  EXPECT_TRUE(Connect(one, (*listener)->port()));
  EXPECT_TRUE(Connect(two, (*listener)->port()));
  EXPECT_TRUE(accepted.Await(2));
}

TEST(PeerListenerTest, ClosesConnectionsThatAreTooMany) {
  auto listener = PeerListener::Listen(Loopback(0), {2, 100, 100});
  ASSERT_TRUE(listener.ok()) << listener.status();
  Accepted accepted;
  (*listener)->Start([&](UniqueFd connection) { accepted.Add(std::move(connection)); });
  const UniqueFd one = MakeSocket(), two = MakeSocket(), three = MakeSocket();
  for (const UniqueFd* client : {&one, &two, &three}) {
    EXPECT_TRUE(Connect(*client, (*listener)->port()));
  }
  EXPECT_TRUE(accepted.Await(2));
  char byte = 0;
  EXPECT_EQ(recv(three.get(), &byte, 1, 0), 0) << "the listener has closed it";
}

// Those that become free belong to the accept loop's reserve.
TEST(PeerListenerTest, AcceptsNothingWhileDescriptorsAreScarce) {
  DescriptorQuota descriptors(100);
  descriptors.SetScarce(true);
  auto listener = PeerListener::Listen(Loopback(0));
  ASSERT_TRUE(listener.ok()) << listener.status();
  (*listener)->LimitDescriptors(&descriptors);
  LogLines log;
  std::atomic<bool> scarce{true}, too_early{false};
  Accepted accepted;
  (*listener)->Start([&](UniqueFd connection) {
    if (scarce.load()) too_early.store(true);
    accepted.Add(std::move(connection));
  });
  const UniqueFd client = MakeSocket();
  EXPECT_TRUE(Connect(client, (*listener)->port())) << "the kernel accepts it";
  EXPECT_TRUE(log.Say("few file descriptors are left"));
  scarce.store(false);
  descriptors.SetScarce(false);
  EXPECT_TRUE(accepted.Await(1));
  EXPECT_FALSE(too_early.load());
}

TEST(PeerListenerTest, SaysOnceThatItCannotAcceptAndOnlyIfSomebodyWaits) {
  constexpr char kCannot[] = "cannot accept connections now";
  for (const bool waits : {false, true}) {
    DescriptorQuota descriptors(100);
    auto listener = PeerListener::Listen(Loopback(0));
    ASSERT_TRUE(listener.ok()) << listener.status();
    (*listener)->LimitDescriptors(&descriptors);
    LogLines log;
    std::atomic<pthread_t> thread{};
    Accepted accepted;
    (*listener)->Start([&](UniqueFd connection) {
      thread.store(pthread_self());
      accepted.Add(std::move(connection));
    });
    const UniqueFd first = MakeSocket(), second = MakeSocket();
    EXPECT_TRUE(Connect(first, (*listener)->port()));
    ASSERT_TRUE(accepted.Await(1));
    descriptors.SetScarce(true);
    if (waits) {
      EXPECT_TRUE(Connect(second, (*listener)->port())) << "the kernel accepts it";
      EXPECT_TRUE(log.Say(kCannot));
    }
    Interrupt(thread.load());  // it looks again
    (*listener)->Stop();
    EXPECT_EQ(log.Count(kCannot), waits ? 1 : 0) << log.said();
  }
}

// gRPC reads a new connection for as long as there is something to read. Meanwhile the listener
// accepts no other one.
TEST(PeerListenerTest, EndsAConnectionThatTakesTooLong) {
  std::atomic<int> connected{0};  // those of the slow one's caller
  std::atomic<bool> next_connected{false};
  auto listener = PeerListener::Listen(Loopback(0));
  ASSERT_TRUE(listener.ok());
  (*listener)->Start([&](UniqueFd connection) {
    sockaddr_in caller{};
    socklen_t size = sizeof(caller);
    getpeername(connection.get(), reinterpret_cast<sockaddr*>(&caller), &size);
    if (caller.sin_addr.s_addr == htonl(INADDR_LOOPBACK)) {
      ++connected;
    } else {
      next_connected = true;
    }
    fcntl(connection.get(), F_SETFL, 0);  // recv() waits
    char byte = 0;
    while (recv(connection.get(), &byte, 1, 0) > 0) {
    }
  });
  const UniqueFd slow = MakeSocket(), again = MakeSocket(), next = MakeSocket();
  EXPECT_TRUE(Connect(slow, (*listener)->port()));
  EXPECT_TRUE(Connect(again, (*listener)->port()));
  sockaddr_in elsewhere{};
  elsewhere.sin_family = AF_INET;
  elsewhere.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  ASSERT_EQ(bind(next.get(), reinterpret_cast<const sockaddr*>(&elsewhere), sizeof(elsewhere)), 0);
  EXPECT_TRUE(Connect(next, (*listener)->port()));
  ASSERT_TRUE(Soon([&] { return connected == 1; }));
  constexpr std::uint64_t kFew = 100;
  (*listener)->EndSlow(/*limit_ns=*/0, kFew);
  char byte = 0;
  EXPECT_EQ(recv(slow.get(), &byte, 1, MSG_DONTWAIT), -1) << "it has sent little";
  ASSERT_EQ(send(slow.get(), std::string(kFew + 1, 'x').data(), kFew + 1, 0), kFew + 1);
  (*listener)->EndSlow(/*limit_ns=*/std::uint64_t{1} << 60, kFew);
  EXPECT_EQ(recv(slow.get(), &byte, 1, MSG_DONTWAIT), -1) << "it may take so long";
  // If the listener's thread is late, it accepts this one after its caller's pause. Then this one
  // takes too long, too.
  ASSERT_EQ(send(again.get(), std::string(kFew + 1, 'x').data(), kFew + 1, 0), kFew + 1);
  const auto again_has_ended = [&] {
    // ECONNRESET: it was refused, and nobody has read what it sent.
    return recv(again.get(), &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET;
  };
  constexpr std::uint64_t kPauseNs = 1'000'000'000;  // the first one
  const std::uint64_t begin_ns = NowNs();
  ASSERT_TRUE(Soon([&] {
    (*listener)->EndSlow(/*limit_ns=*/0, kFew);
    return next_connected && again_has_ended();
  })) << "the other connection is accepted";
  EXPECT_EQ(recv(slow.get(), &byte, 1, 0), 0) << "the slow one has ended";
  EXPECT_TRUE(connected == 1 || NowNs() >= begin_ns + kPauseNs) << "its caller has a pause";
}

TEST(PeerListenerTest, SaysWhyItCannotListen) {
  const auto first = PeerListener::Listen(Loopback(0));
  ASSERT_TRUE(first.ok());
  const auto second = PeerListener::Listen(Loopback((*first)->port()));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.status().message(), absl::StrCat("peer_listen: cannot listen on 127.0.0.1:",
                                                    (*first)->port(), ": Address already in use"));
  PeerAddress elsewhere = Loopback(0);
  elsewhere.host = "192.0.2.1";
  EXPECT_EQ(PeerListener::Listen(elsewhere).status().code(), absl::StatusCode::kUnavailable);
}

TEST(PeerListenerTest, AcceptsNoMoreOnceStopped) {
  auto listener = PeerListener::Listen(Loopback(0));
  ASSERT_TRUE(listener.ok());
  (*listener)->Start([](UniqueFd) {});
  (*listener)->Stop();
  (*listener)->Stop();
  EXPECT_FALSE(Connect(MakeSocket(), (*listener)->port()));
}

// CVE-2023-4785: gRPC's own loop accepts nothing any more after this.
TEST(PeerListenerTest, AcceptsAgainAfterTheProcessHasRunOutOfDescriptors) {
  if (kScale != 1) GTEST_SKIP() << "UndefinedBehaviorSanitizer checks a virtual call with a pipe";
  LogLines log;
  auto listener = PeerListener::Listen(Loopback(0));
  ASSERT_TRUE(listener.ok());
  Accepted accepted;
  (*listener)->Start([&](UniqueFd connection) { accepted.Add(std::move(connection)); });
  const UniqueFd client = MakeSocket();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  // No more than are open already.
  const int next = fcntl(client.get(), F_DUPFD_CLOEXEC, 0);
  ASSERT_GE(next, 0);
  close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_TRUE(Connect(client, (*listener)->port()));
  // Until it has tried in vain.
  EXPECT_TRUE(log.Say("cannot accept connections now"));
  EXPECT_TRUE(log.Say("Too many open files")) << log.said();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(accepted.Await(1));
}

}  // namespace
}  // namespace gradsync::daemon
