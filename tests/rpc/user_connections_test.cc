#include "daemon/rpc/user_connections.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/arena/arena_quota.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/rpc/client_input.h"
#include "tests/attack/raw_http2.h"
#include "tests/kit/child_process.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kMost = 8;
constexpr std::uint64_t kTickNs = 50'000'000;

class UserConnectionsTest : public testing::Test {
 protected:
  UserConnectionsTest() { grpc_init(); }
  ~UserConnectionsTest() override { grpc_shutdown(); }

  // Both ends of a connection. The daemon's is gRPC's, or nobody's.
  struct Pair {
    UniqueFd ours, theirs;
    std::shared_ptr<void> quota = std::make_shared<int>();
    std::shared_ptr<ClientInput> input = std::make_shared<ClientInput>();
    bool held() const { return quota.use_count() > 1; }
    bool ended() const {
      char byte = 0;
      return recv(theirs.get(), &byte, 1, MSG_DONTWAIT) == 0;
    }
  };
  static Pair Open() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
  }
  // The daemon sends as much as the kernel takes.
  static void Fill(const Pair& pair) {
    const std::string bytes(4096, 'x');
    while (send(pair.ours.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
    }
  }
  static void Empty(const Pair& pair) {
    char bytes[4096];
    while (recv(pair.theirs.get(), bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
    }
  }
  absl::Status Expect(const Pair& pair) {
    return connections_.Expect(pair.ours.get(), pair.quota, pair.input);
  }
  bool WatchAt(std::uint64_t now_ns) { return connections_.Watch(server_, now_ns); }

  static constexpr std::uint64_t kQuota = 2 * UserConnections::kUnreadBytes;
  static constexpr Tenant kUser{1000};

  ArenaQuota memory_{kQuota, "quota_control_bytes_per_user", "the daemon's own memory"};
  CountedServer server_;
  UserConnections connections_{MemoryAccount{&memory_, kUser}, kMost};
  std::uint64_t now_ns_ = 1'000'000'000'000;
};

TEST_F(UserConnectionsTest, WatchesWhileThereIsAConnection) {
  EXPECT_FALSE(WatchAt(now_ns_));
  Pair one = Open();
  ASSERT_TRUE(Expect(one).ok());
  EXPECT_TRUE(WatchAt(now_ns_));
  EXPECT_TRUE(one.held());
  one.ours.reset();
  EXPECT_FALSE(WatchAt(now_ns_ + 2'000'000'000));
  EXPECT_FALSE(one.held());
}

TEST_F(UserConnectionsTest, EndAllEndsThoseThatHaveComeAndRefusesOthers) {
  const Pair watched = Open(), expected = Open(), late = Open();
  ASSERT_TRUE(Expect(watched).ok());
  WatchAt(now_ns_);
  ASSERT_TRUE(Expect(expected).ok());
  connections_.EndAll();
  EXPECT_TRUE(watched.ended());
  EXPECT_TRUE(expected.ended());
  EXPECT_EQ(Expect(late).code(), absl::StatusCode::kUnavailable);
}

TEST_F(UserConnectionsTest, ForgetsSoonWhenManyHaveCome) {
  std::vector<Pair> pairs;
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Expect(pairs.emplace_back(Open())).ok());
  EXPECT_TRUE(WatchAt(now_ns_));
  for (Pair& pair : pairs) pair.ours.reset();
  for (int i = 0; i < 400; ++i) {
    Pair pair = Open();
    ASSERT_TRUE(Expect(pair).ok());
    pair.ours.reset();
  }
  WatchAt(now_ns_ + 1);
  for (const Pair& pair : pairs) EXPECT_FALSE(pair.held());
}

TEST_F(UserConnectionsTest, EndsAConnectionAWhileAfterItsClientHasClosedItsHalf) {
  const Pair closed = Open(), open = Open();
  ASSERT_TRUE(Expect(closed).ok());
  ASSERT_TRUE(Expect(open).ok());
  shutdown(closed.theirs.get(), SHUT_WR);
  const std::uint64_t until_ns = now_ns_ + 10'000'000'000;
  std::uint64_t ended_ns = 0;
  for (std::uint64_t at = now_ns_; at < until_ns && ended_ns == 0; at += kTickNs) {
    EXPECT_TRUE(WatchAt(at));
    if (closed.ended()) ended_ns = at;
  }
  EXPECT_GE(ended_ns, now_ns_ + UserConnections::kClosingNs);
  EXPECT_LE(ended_ns, now_ns_ + 3 * UserConnections::kClosingNs);
  EXPECT_FALSE(open.ended());
  EXPECT_TRUE(closed.held()) << "until gRPC closes it";
}

TEST_F(UserConnectionsTest, AConnectionThatIsNotReadCostsItsUser) {
  const Pair unread = Open(), read = Open();
  ASSERT_TRUE(Expect(unread).ok());
  ASSERT_TRUE(Expect(read).ok());
  Fill(unread);
  WatchAt(now_ns_);
  EXPECT_EQ(memory_.bytes_of(kUser), 0u) << "it may be read in a moment";
  WatchAt(now_ns_ + UserConnections::kUnreadNs);
  EXPECT_EQ(memory_.bytes_of(kUser), UserConnections::kUnreadBytes);
  WatchAt(now_ns_ + 2 * UserConnections::kUnreadNs);
  EXPECT_EQ(memory_.bytes_of(kUser), UserConnections::kUnreadBytes) << "once";
  Empty(unread);
  WatchAt(now_ns_ + 3 * UserConnections::kUnreadNs);
  EXPECT_EQ(memory_.bytes_of(kUser), 0u);
  EXPECT_FALSE(unread.ended());
}

TEST_F(UserConnectionsTest, EndsConnectionsThatAreNotReadBeyondTheQuota) {
  std::vector<Pair> pairs;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(Expect(pairs.emplace_back(Open())).ok());
    Fill(pairs.back());
  }
  const Pair read = Open();
  ASSERT_TRUE(Expect(read).ok());
  WatchAt(now_ns_);
  WatchAt(now_ns_ + UserConnections::kUnreadNs);
  EXPECT_EQ(memory_.bytes_of(kUser), kQuota);
  int ended = 0;
  for (const Pair& pair : pairs) {
    Empty(pair);
    ended += pair.ended() ? 1 : 0;
  }
  EXPECT_EQ(ended, 2);
  EXPECT_FALSE(read.ended());
}

TEST_F(UserConnectionsTest, AClosedConnectionCostsNothingMore) {
  Pair unread = Open();
  ASSERT_TRUE(Expect(unread).ok());
  Fill(unread);
  WatchAt(now_ns_);
  WatchAt(now_ns_ + UserConnections::kUnreadNs);
  ASSERT_GT(memory_.bytes_of(kUser), 0u);
  unread.ours.reset();
  WatchAt(now_ns_ + 2 * UserConnections::kUnreadNs);
  EXPECT_EQ(memory_.bytes_of(kUser), 0u);
}

// With a gRPC server that answers no call, so that calls stay open.
class UserConnectionsCallsTest : public UserConnectionsTest {
 protected:
  UserConnectionsCallsTest() {
    grpc::ServerBuilder builder;
    queue_ = builder.AddCompletionQueue();
    builder.RegisterAsyncGenericService(&service_);
    grpc_server_ = builder.BuildAndStart();
    server_ = CountedServer::Newest();
    Request();
    thread_ = std::thread([this] {
      void* tag = nullptr;
      bool ok = false;
      while (queue_->Next(&tag, &ok)) {
        Call* const call = static_cast<Tag*>(tag)->call;
        const bool begins = tag == &call->begun;
        if (begins && ok) Request();
        if (!begins || !ok) delete call;
      }
    });
  }
  ~UserConnectionsCallsTest() override {
    clients_.clear();
    grpc_server_->Shutdown(std::chrono::system_clock::now());
    queue_->Shutdown();
    thread_.join();
  }

  // A call on the server. It lives until its client has cancelled it.
  struct Call;
  struct Tag {
    Call* call;
  };
  struct Call {
    grpc::GenericServerContext context;
    grpc::GenericServerAsyncReaderWriter stream{&context};
    Tag begun{this}, done{this};
  };
  void Request() {
    auto* const call = new Call;
    call->context.AsyncNotifyWhenDone(&call->done);
    service_.RequestCall(&call->context, &call->stream, queue_.get(), queue_.get(), &call->begun);
  }

  // A process with so many open calls.
  struct Client {
    ~Client() {
      for (const auto& context : contexts) context->TryCancel();
      queue.Shutdown();
      void* tag = nullptr;
      bool ok = false;
      while (queue.Next(&tag, &ok)) {
      }
    }
    void Call(int calls) {
      grpc::GenericStub stub(channel);
      for (int i = 0; i < calls; ++i) {
        contexts.push_back(std::make_unique<grpc::ClientContext>());
        streams.push_back(stub.PrepareCall(contexts.back().get(), "/any/Method", &queue));
        streams.back()->StartCall(nullptr);
      }
    }
    bool connected() const { return socket.IsOpen(); }

    BorrowedSocket socket;  // of the daemon
    std::shared_ptr<grpc::Channel> channel;
    grpc::CompletionQueue queue;
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> streams;
  };
  // Null if there may be no new connection.
  Client* Connect() {
    Pair pair = Open();
    if (!Expect(pair).ok()) return nullptr;
    clients_.push_back(std::make_unique<Client>());
    clients_.back()->socket = BorrowedSocket(pair.ours.get());
    grpc::AddInsecureChannelFromFd(grpc_server_.get(), pair.ours.release());
    clients_.back()->channel = grpc::CreateInsecureChannelFromFd("test", pair.theirs.release());
    return clients_.back().get();
  }
  bool AwaitOpenCalls(std::uint64_t calls) {
    return Soon([&] { return server_.Calls().open() == calls; });
  }
  // The next look.
  void Watch() { WatchAt(now_ns_ += kTickNs); }

  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> grpc_server_;
  std::thread thread_;
  std::vector<std::unique_ptr<Client>> clients_;
};

TEST_F(UserConnectionsCallsTest, AsManyCallsAsAUserMayHaveStay) {
  Client* const one = Connect();
  Client* const two = Connect();
  one->Call(kMost - 1);
  two->Call(1);
  ASSERT_TRUE(AwaitOpenCalls(kMost));
  for (int i = 0; i < 50; ++i) Watch();
  EXPECT_TRUE(one->connected());
  EXPECT_TRUE(two->connected());
  EXPECT_NE(Connect(), nullptr);
}

TEST_F(UserConnectionsCallsTest, TheBusiestConnectionEndsAndTheOthersStay) {
  Client* const trainer = Connect();
  Client* const attacker = Connect();
  trainer->Call(1);
  attacker->Call(kMost);
  ASSERT_TRUE(AwaitOpenCalls(kMost + 1));
  Watch();
  EXPECT_EQ(Connect(), nullptr) << "no new connection";
  ASSERT_TRUE(AwaitOpenCalls(1));
  EXPECT_TRUE(Soon([&] { return !attacker->connected(); }));
  EXPECT_TRUE(trainer->connected());
  for (std::uint64_t waited_ns = kTickNs; waited_ns < GrowingPause::kFirstNs;
       waited_ns += kTickNs) {
    Watch();
    EXPECT_EQ(Connect(), nullptr) << waited_ns;
  }
  for (int i = 0; i < 2; ++i) Watch();
  EXPECT_NE(Connect(), nullptr);
  EXPECT_TRUE(trainer->connected());
}

class RecentCallsTest : public UserConnectionsCallsTest {
 protected:
  // The user is paused, so each look counts the calls of each connection. One call is open.
  RecentCallsTest() {
    caller_->Call(1);
    EXPECT_TRUE(AwaitOpenCalls(1));
    Client* const attacker = Connect();
    reset_ = Connect();
    attacker->Call(kMost);
    EXPECT_TRUE(AwaitOpenCalls(kMost + 1));
    Watch();
    EXPECT_TRUE(AwaitOpenCalls(1));
  }

  // Begins more calls on reset_ than a quiet connection does, and resets them.
  void BeginAndReset() {
    const int calls = UserConnections::kFewCalls + 1;
    reset_->Call(calls);
    ASSERT_TRUE(AwaitOpenCalls(1 + calls));
    for (const auto& context : reset_->contexts) context->TryCancel();
    ASSERT_TRUE(AwaitOpenCalls(1));
  }
  // The caller opens too many calls.
  void Exceed() {
    caller_->Call(kMost);
    ASSERT_TRUE(AwaitOpenCalls(kMost + 1));
  }

  Client* const caller_ = Connect();
  Client* reset_ = nullptr;
};

TEST_F(RecentCallsTest, AConnectionThatHasBegunManyCallsJustNowEndsToo) {
  BeginAndReset();
  Exceed();
  Watch();
  EXPECT_TRUE(Soon([&] { return !reset_->connected(); }));
}

TEST_F(RecentCallsTest, ItEndsAlsoIfALookHasJustSeenItsCalls) {
  BeginAndReset();
  Watch();
  Exceed();
  WatchAt(now_ns_);  // as after a new connection
  EXPECT_TRUE(Soon([&] { return !reset_->connected(); }));
}

class LongHeadersTest : public UserConnectionsTest {
 protected:
  // A client whose connection the test reads as gRPC does.
  struct Client {
    Pair pair;
    attack::RawHttp2 http2;

    // False: the connection has ended.
    bool Read() const {
      char bytes[4096];
      iovec part{bytes, sizeof(bytes)};
      for (;;) {
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        const ssize_t size = recvmsg(pair.ours.get(), &message, MSG_DONTWAIT);
        if (size <= 0) return size < 0;
      }
    }
    // Sends less than 1 KiB of headers.
    bool Continue() {
      http2.ContinueShortHeaders();
      return Read();
    }
  };
  // It has begun to send headers.
  std::unique_ptr<Client> Begin() {
    Pair pair = Open();
    EXPECT_TRUE(Expect(pair).ok());
    const int theirs = dup(pair.theirs.get());
    auto client = std::make_unique<Client>(
        Client{std::move(pair), attack::RawHttp2(Descriptor(theirs), 65535)});
    client->http2.BeginShortHeaders("/any/Method");
    EXPECT_TRUE(client->Read());
    return client;
  }
  void Watch() { WatchAt(now_ns_ += kTickNs); }
  bool MayConnect() { return Expect(Open()).ok(); }
};

TEST_F(LongHeadersTest, ConnectionEndsBeforeTooLongHeadersAreRead) {
  const auto client = Begin();
  int pieces = 1;
  while (client->Continue()) ++pieces;
  EXPECT_GT(pieces, 8) << "8 KiB are allowed";
  EXPECT_LT(pieces, 11);
  EXPECT_TRUE(MayConnect());
  Watch();
  EXPECT_FALSE(MayConnect()) << "its user is paused";
}

TEST_F(LongHeadersTest, UserIsPausedAlsoIfTheConnectionIsForgottenMeanwhile) {
  WatchAt(now_ns_);
  const auto client = Begin();
  while (client->Continue()) {
  }
  client->pair.ours.reset();
  WatchAt(now_ns_ += 2'000'000'000);  // forgets it
  EXPECT_FALSE(MayConnect());
}

TEST_F(LongHeadersTest, ConnectionsEndIfTheirUnfinishedHeadersAreMuchTogether) {
  Pair idle = Open();
  ASSERT_TRUE(Expect(idle).ok());
  std::vector<std::unique_ptr<Client>> clients;
  std::uint64_t sum = 0;
  for (; sum + (8 << 10) <= UserConnections::kMostUnfinished; sum += 8 << 10) {
    clients.push_back(Begin());
    for (int i = 0; i < 7; ++i) ASSERT_TRUE(clients.back()->Continue());
  }
  Watch();
  EXPECT_TRUE(MayConnect());
  for (int i = 0; i < 10; ++i) {
    clients.push_back(Begin());
    for (int piece = 0; piece < 7; ++piece) ASSERT_TRUE(clients.back()->Continue());
  }
  Watch();
  for (const auto& client : clients) EXPECT_FALSE(client->Read());
  EXPECT_FALSE(idle.ended());
  EXPECT_FALSE(MayConnect()) << "the user is paused";
}

TEST_F(LongHeadersTest, ConnectionEndsAtOnceIfACallHadTooLongHeaders) {
  const Pair pair = Open();
  ASSERT_TRUE(Expect(pair).ok());
  pair.input->long_headers.store(true);
  Watch();
  EXPECT_TRUE(pair.ended());
  EXPECT_FALSE(MayConnect()) << "its user is paused";
}

}  // namespace
}  // namespace gradsync::daemon
