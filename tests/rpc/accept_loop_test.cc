#include "daemon/rpc/accept_loop.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/descriptor_reserve.h"
#include "daemon/rpc/listening_socket.h"
#include "daemon/session/descriptor_quota.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/kit/deadline.h"
#include "tests/kit/no_descriptors.h"
#include "tests/kit/soon.h"
#include "tests/session/session_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr uid_t kOther = 12345;  // neither root nor the daemon's user

// Listens at an address without a path, so that every user can connect.
class Address {
 public:
  explicit Address(int type) : type_(type) {
    const int listener = socket(AF_UNIX, type_ | SOCK_CLOEXEC, 0);
    address_.sun_family = AF_UNIX;
    auto* const any = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(bind(listener, any, sizeof(sa_family_t)), 0);
    EXPECT_EQ(listen(listener, 128), 0);
    EXPECT_EQ(getsockname(listener, any, &length_), 0);
    listener_ = UniqueFd(listener);
  }
  ListeningSocket TakeListener() { return ListeningSocket::Adopt(listener_.release()); }
  UniqueFd MakeClient() const { return UniqueFd(socket(AF_UNIX, type_ | SOCK_CLOEXEC, 0)); }
  bool Connect(const UniqueFd& client) const {
    return connect(client.get(), reinterpret_cast<const sockaddr*>(&address_), length_) == 0;
  }

 private:
  const int type_;
  sockaddr_un address_{};
  socklen_t length_ = sizeof(address_);
  UniqueFd listener_;
};

// What the loop sends first; -1: nothing; 0: it has closed the connection.
ssize_t Receive(const UniqueFd& client) {
  pollfd answer{client.get(), POLLIN, 0};
  if (poll(&answer, 1, kPatienceMs) != 1) return -1;
  FdReply reply;
  return recv(client.get(), &reply, sizeof(reply), MSG_DONTWAIT);
}

// True if the side socket answers. The nonce is unknown, and the answer says so.
bool IsAnswered(const UniqueFd& client) {
  const FdRequest request;
  return send(client.get(), &request, sizeof(request), MSG_NOSIGNAL) == sizeof(request) &&
         Receive(client) == sizeof(FdReply);
}

// Runs it in a thread of another user. False: this process cannot become that user.
bool AsOther(const std::function<void()>& run) {
  bool is_other = false;
  std::thread([&] {
    // For this thread alone.
    is_other = syscall(SYS_setresuid, kOther, kOther, kOther) == 0;
    if (is_other) run();
  }).join();
  return is_other;
}

class AcceptLoopTest : public SessionFixture {
 protected:
  void SetUp() override {
    if (kScale != 1) GTEST_SKIP() << "UndefinedBehaviorSanitizer checks a virtual call with a pipe";
    AcceptLoop::Hooks hooks;
    hooks.connected = [this](Connections::Admitted connection, const Tenant&) {
      MutexLock lock(&mutex_);
      given_.push_back(std::move(connection));
      return absl::OkStatus();
    };
    hooks.tick = [this] {
      ++ticks_;
      return false;
    };
    auto loop = AcceptLoop::Start(grpc_.TakeListener(), side_.TakeListener(), &connections_,
                                  &sessions_, std::move(hooks));
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }
  void TearDown() override {
    loop_.reset();
    SessionFixture::TearDown();
  }

  std::size_t Given() {
    MutexLock lock(&mutex_);
    return given_.size();
  }
  void CloseGiven() {
    MutexLock lock(&mutex_);
    given_.clear();
  }

  Address grpc_{SOCK_STREAM};
  Address side_{SOCK_SEQPACKET};
  DescriptorQuota descriptors_{1000};
  Connections connections_{&descriptors_};
  std::atomic<int> ticks_{0};
  Mutex mutex_;
  std::vector<Connections::Admitted> given_ ABSL_GUARDED_BY(mutex_);  // as gRPC has them
  std::unique_ptr<AcceptLoop> loop_;
};

TEST_F(AcceptLoopTest, TheSideSocketAnswersWhenAllDescriptorsAreInUse) {
  const UniqueFd client = side_.MakeClient();
  bool connected = false, answered = false;
  {
    const NoDescriptors none;
    connected = side_.Connect(client);
    answered = connected && IsAnswered(client);
  }
  EXPECT_TRUE(connected);
  EXPECT_TRUE(answered);
  EXPECT_TRUE(Soon([&] { return !descriptors_.scarce(); })) << "it refills the reserve";
}

// Others may have used up the descriptors.
TEST_F(AcceptLoopTest, TheSideSocketCountsNoConnectionForWhichItHasNoDescriptors) {
  std::vector<UniqueFd> silent(DescriptorReserve::kPerUser);
  std::vector<UniqueFd> refused(200);  // more than a user may connect in vain
  for (auto* clients : {&silent, &refused}) {
    for (UniqueFd& client : *clients) client = side_.MakeClient();
  }
  bool are_refused = true, answered = false;
  const auto use_up = [&] {
    for (const UniqueFd& client : silent) side_.Connect(client);
    for (const UniqueFd& client : refused) {
      are_refused = are_refused && side_.Connect(client) && Receive(client) == 0;
    }
  };
  {
    const NoDescriptors none;
    if (!AsOther(use_up)) GTEST_SKIP() << "it cannot become another user";
    silent.clear();
  }
  EXPECT_TRUE(are_refused);
  ASSERT_TRUE(Soon([&] { return !descriptors_.scarce(); }));
  const UniqueFd next = side_.MakeClient();
  AsOther([&] { answered = side_.Connect(next) && IsAnswered(next); });
  EXPECT_TRUE(answered);
}

// The kernel lets the daemon's user have only so many descriptors on the way. A client that reads
// none must not use up all of them.
TEST_F(AcceptLoopTest, AnAnswerWithDescriptorsCountsUntilItsClientHasReadIt) {
  const Opened opened = Open(0, 2, Client(geteuid(), getpid()));
  ASSERT_TRUE(opened.session.ok()) << opened.session.status();
  std::vector<UniqueFd> unread(64);  // as many as a user may have
  for (UniqueFd& client : unread) {
    const auto nonce =
        sessions_.Offer(**opened.session, {{opened->staging(), opened->staging()->fd()}});
    ASSERT_TRUE(nonce.ok()) << nonce.status();
    FdRequest request;
    std::memcpy(request.nonce, nonce->data(), nonce->size());
    client = side_.MakeClient();
    ASSERT_TRUE(side_.Connect(client));
    ASSERT_EQ(send(client.get(), &request, sizeof(request), MSG_NOSIGNAL), sizeof(request));
    pollfd answer{client.get(), POLLIN, 0};
    ASSERT_EQ(poll(&answer, 1, kPatienceMs), 1);
  }
  const UniqueFd refused = side_.MakeClient();
  ASSERT_TRUE(side_.Connect(refused));
  EXPECT_EQ(Receive(refused), 0);
  EXPECT_EQ(Receive(unread[0]), sizeof(FdReply));
  EXPECT_TRUE(Soon([&] {
    const UniqueFd next = side_.MakeClient();
    return side_.Connect(next) && IsAnswered(next);
  }));
}

// To refuse one takes time, too.
TEST_F(AcceptLoopTest, ConnectionsOfAUserThatHasAllItMayHaveCountAsConnects) {
  auto all = descriptors_.Take(Tenant(kOther), 1000);
  ASSERT_TRUE(all.ok());
  std::vector<UniqueFd> refused(600);  // more than a user may connect at once
  for (UniqueFd& client : refused) client = grpc_.MakeClient();
  const auto connect = [&](const UniqueFd& client) {
    return grpc_.Connect(client) && Receive(client) == 0;
  };
  bool are_refused = true, is_refused = false;
  // Fewer than a user may connect at once. The user may have regained a few connects by then, so
  // gRPC may be given the first of these.
  std::vector<UniqueFd> next(20);
  for (UniqueFd& client : next) client = grpc_.MakeClient();
  std::size_t given = 0;
  const auto is_given = [&](const UniqueFd& client) {
    pollfd end{client.get(), POLLIN, 0};
    const std::size_t before = Given();
    EXPECT_TRUE(grpc_.Connect(client));
    EXPECT_TRUE(Soon([&] { return Given() > before || poll(&end, 1, /*timeout=*/0) == 1; }));
    return Given() > before;
  };
  const auto use_up = [&] {
    for (const UniqueFd& client : refused) are_refused = are_refused && connect(client);
    given = Given();
    all->reset();
    for (const UniqueFd& client : next) is_refused = is_refused || !is_given(client);
  };
  if (!AsOther(use_up)) GTEST_SKIP() << "it cannot become another user";
  EXPECT_TRUE(are_refused);
  EXPECT_EQ(given, 0u);
  EXPECT_TRUE(is_refused);
}

// gRPC may close its descriptor long after the client has closed the connection.
TEST_F(AcceptLoopTest, TicksUntilTheReserveIsFull) {
  UniqueFd client = grpc_.MakeClient();
  const NoDescriptors none;
  ASSERT_TRUE(grpc_.Connect(client));
  ASSERT_TRUE(Soon([&] { return Given() == 1; }));
  ASSERT_TRUE(descriptors_.scarce());
  // Not closed, because the reserve would take its descriptor.
  ASSERT_EQ(shutdown(client.get(), SHUT_RDWR), 0);
  ASSERT_TRUE(Soon([&] { return connections_.Users().empty(); }));
  const int ticks = ticks_.load();
  EXPECT_TRUE(Soon([&] { return ticks_.load() >= ticks + 2; }));
  EXPECT_TRUE(descriptors_.scarce());
  CloseGiven();
  EXPECT_TRUE(Soon([&] { return !descriptors_.scarce(); }));
}

}  // namespace
}  // namespace gradsync::daemon
