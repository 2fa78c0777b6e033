// Streams between daemons whose messages wait for their turn. gRPC carries them; the test decides
// when a turn comes.

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "daemon/base/executor.h"
#include "daemon/base/fair_executor.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/caller.h"
#include "daemon/job/job.h"
#include "daemon/peer/coordinator_link.h"
#include "daemon/peer/dialed_sockets.h"
#include "daemon/peer/peer_server.h"
#include "daemon/peer/peer_turns.h"
#include "daemon/peer/user_rate.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/completion_dispatcher.h"
#include "daemon/rpc/stream_count.h"
#include "gradsync/v1/peer.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/child_process.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/soon.h"
#include "tests/peer/coordinating_node.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kUser(1000);
constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kRankPatienceNs = 3600 * kSecond;  // with its coordinator

// Keeps the turns until the test gives them, or lets all come. Thread-safe.
class HeldTurns final : public UserExecutor {
 public:
  void Run(const Tenant& user, std::function<void()> work) override {
    {
      MutexLock lock(&mutex_);
      if (!free_) {
        held_[user].push_back(std::move(work));
        return;
      }
    }
    executor_.Run(user, std::move(work));
  }
  std::size_t Held(const Tenant& user) {
    MutexLock lock(&mutex_);
    return held_[user].size();
  }
  // Waits until this user has a turn, and gives it. False: none comes.
  bool Give(const Tenant& user) {
    if (!Soon([&] { return Held(user) > 0; })) return false;
    std::function<void()> work;
    {
      MutexLock lock(&mutex_);
      work = std::move(held_[user].front());
      held_[user].pop_front();
    }
    work();
    return true;
  }
  void Free() {
    std::map<Tenant, std::deque<std::function<void()>>> held;
    {
      MutexLock lock(&mutex_);
      free_ = true;
      held.swap(held_);
    }
    for (auto& [user, queue] : held) {
      for (auto& work : queue) executor_.Run(user, std::move(work));
    }
  }

 private:
  Mutex mutex_;
  bool free_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Tenant, std::deque<std::function<void()>>> held_ ABSL_GUARDED_BY(mutex_);
  FairExecutor executor_{2};  // last
};

bool EndSoon(const StreamCount& streams) {
  return streams.WaitForNone(std::chrono::steady_clock::now() +
                             std::chrono::milliseconds(kPatienceMs));
}

// ---- On the coordinator

TEST(PeerServerTest, NewestStreamIsOneTooMany) {
  const auto why = [](std::size_t all, std::size_t of_network, std::size_t greeted) {
    return PeerServer::WhyTooMany({all, of_network, greeted}, "fd00::1", "fd00::/64");
  };
  EXPECT_EQ(why(4096, 3584, 255), "");
  EXPECT_EQ(why(4097, 1, 0), "4096 streams of other nodes, as many as it may");
  EXPECT_EQ(why(3585, 3585, 0), "3584 streams of fd00::/64, as many as one network may have");
  EXPECT_EQ(why(257, 257, 256), "256 streams of fd00::1, as many as one address may have");
}

class AgentTurnsTest : public testing::Test {
 protected:
  using Stream = grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>;

  // Whose turns the node's messages have once it is part of a job.
  static Tenant OfNode() { return Tenant(kUser); }

  void SetUp() override {
    node_.context.turns = &peer_turns_;
    node_.context.callers_input = [this](const std::string& caller) {
      return server_->InputOf(caller);
    };
    node_.context.unread_bytes = [this](const std::string& /*caller*/) { return unread_.load(); };
    auto server = PeerServer::Listen({"127.0.0.1", 0, true}, grpc::InsecureServerCredentials(),
                                     /*plain_text=*/true);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->Accept(
        node_.context, [] {}, [this] { used_.store(true); });
    stub_ = v1::Peer::NewStub(
        grpc::CreateChannel(server_->address().Target(), grpc::InsecureChannelCredentials()));
    stream_ = stub_->Attach(&call_);
  }
  void TearDown() override {
    call_.TryCancel();
    peer_turns_.Stop();
    turns_.Free();
    if (!shut_down_) server_->Shutdown();
    EXPECT_TRUE(EndSoon(server_->streams()));
    server_->Stop();
    if (stream_ != nullptr) {
      for (v1::AttachResponse message; stream_->Read(&message);) {
      }
      stream_->Finish();
    }
    node_.node_groups.Shutdown();
    node_.node_groups.Clear();
  }

  void Attach() {
    ASSERT_TRUE(stream_->Write(HelloOf(kUser.uid)));
    EXPECT_EQ(turns_.Held(OfNode()), 0u) << "it is a stranger's";
    ASSERT_TRUE(turns_.Give(kStrangers));
    v1::AttachResponse welcome;
    ASSERT_TRUE(stream_->Read(&welcome) && welcome.has_welcome());
  }
  void Open(std::uint32_t rank) { ASSERT_TRUE(stream_->Write(OpenOf(rank, rank + 1))); }
  // Sends a message whose text is not UTF-8.
  void WriteNoMessage(std::size_t bytes) {
    v1::AttachRequest message;
    message.mutable_rank_ended()->mutable_status()->set_message(std::string(bytes, '\xFF'));
    ASSERT_TRUE(stream_->Write(message));
  }
  void ExpectRefused(const std::string& why) {
    v1::AttachResponse response;
    EXPECT_FALSE(stream_->Read(&response));
    const grpc::Status end = stream_->Finish();
    stream_ = nullptr;
    EXPECT_EQ(end.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(end.error_message().find(why), std::string::npos) << end.error_message();
  }
  RankState StateOf(std::uint32_t rank) const {
    const auto jobs = node_.jobs.Jobs();
    return jobs.empty() ? RankState::kAbsent : jobs.front()->StateOf(rank);
  }

  ManualClock clock_;
  PeerTurns peer_turns_{&clock_, &turns_};
  HeldTurns turns_;  // after peer_turns_, which its last tasks use
  FairExecutor executor_{1};
  CoordinatingNode node_{&clock_, &executor_, &turns_};
  std::unique_ptr<PeerServer> server_;
  std::unique_ptr<v1::Peer::Stub> stub_;
  grpc::ClientContext call_;
  std::unique_ptr<Stream> stream_;
  bool shut_down_ = false;
  std::atomic<bool> used_{false};
  std::atomic<std::size_t> unread_{0};  // bytes in the agent's socket
};

// Also a silent caller uses the daemon. Memory that it makes the daemon allocate goes back to the
// system.
TEST_F(AgentTurnsTest, AConnectedCallerUsesTheDaemon) {
  EXPECT_TRUE(Soon([this] { return used_.load(); }));
}

TEST_F(AgentTurnsTest, MessagesAreHandledInOrder) {
  Attach();
  Open(0);
  Open(1);
  ASSERT_TRUE(turns_.Give(OfNode()));
  EXPECT_EQ(StateOf(0), RankState::kLive);
  EXPECT_EQ(StateOf(1), RankState::kAbsent);
  ASSERT_TRUE(turns_.Give(OfNode()));
  EXPECT_EQ(StateOf(1), RankState::kLive);
}

TEST_F(AgentTurnsTest, EachCallAndMessageIsCountedWhenItComes) {
  Attach();
  const std::string caller = server_->Sessions().at(0)->caller();
  const auto input = server_->InputOf(caller);
  ASSERT_NE(input, nullptr);
  EXPECT_EQ(input->received.load(), 2u) << "the call and Hello";
  Open(0);
  EXPECT_TRUE(Soon([&] { return input->received.load() == 3; })) << "before its turn";
  EXPECT_EQ(StateOf(0), RankState::kAbsent);
}

TEST_F(AgentTurnsTest, AnAgentIsNotSilentWhileItsMessageWaits) {
  Attach();
  Open(0);
  ASSERT_TRUE(Soon([&] { return turns_.Held(OfNode()) == 1; }));
  v1::AttachRequest pong;
  pong.mutable_pong();
  const auto sessions = server_->Sessions();
  ASSERT_EQ(sessions.size(), 1u);
  // It answers each ping, but nobody reads the answers.
  for (int second = 0; second < 20; ++second) {
    clock_.Advance(kSecond);
    sessions[0]->Tick(clock_.NowNs());
    ASSERT_TRUE(stream_->Write(pong));
  }
  ASSERT_TRUE(turns_.Give(OfNode()));
  sessions[0]->Tick(clock_.NowNs());
  Open(1);  // behind the pongs, which have no turns
  ASSERT_TRUE(turns_.Give(OfNode()));
  EXPECT_EQ(StateOf(0), RankState::kLive);
  EXPECT_EQ(StateOf(1), RankState::kLive);
}

// Else it would keep one of the places of its address, and answer pings.
TEST_F(AgentTurnsTest, AnAgentThatNeverReadsItsEndIsGoneAfterAWhile) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 5);
  const auto stub = v1::Peer::NewStub(grpc::CreateCustomChannel(
      server_->address().Target(), grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext call;
  const auto stream = stub->Attach(&call);
  ASSERT_TRUE(stream->Write(HelloOf(kUser.uid)));
  ASSERT_TRUE(turns_.Give(kStrangers));
  // Its Welcome does not fit the window. A second Hello ends the stream.
  ASSERT_TRUE(stream->Write(HelloOf(kUser.uid)));
  ASSERT_TRUE(turns_.Give(OfNode()));
  const auto greeted = [&] {
    const auto sessions = server_->Sessions();
    return std::count_if(sessions.begin(), sessions.end(),
                         [](const auto& session) { return session->greeted(); });
  };
  EXPECT_EQ(greeted(), 1);
  clock_.Advance(kPeerSilenceNs + 1);
  for (const auto& session : server_->Sessions()) session->Tick(clock_.NowNs());
  ASSERT_TRUE(Soon([&] { return turns_.Held(OfNode()) > 0 || greeted() == 0; }));
  turns_.Free();
  EXPECT_TRUE(Soon([&] { return greeted() == 0; }));
}

// It answers no ping, but bytes of it wait in the socket: gRPC's threads may be slow.
TEST_F(AgentTurnsTest, AnAgentIsSilentLaterIfItsSocketHasUnreadBytes) {
  Attach();
  const auto sessions = server_->Sessions();
  ASSERT_EQ(sessions.size(), 1u);
  unread_.store(1);
  clock_.Advance(kSecond);
  sessions[0]->Tick(clock_.NowNs());  // asks
  clock_.Advance(kUnreadSilenceNs);
  sessions[0]->Tick(clock_.NowNs());
  Open(0);
  ASSERT_TRUE(turns_.Give(OfNode()));
  EXPECT_EQ(StateOf(0), RankState::kLive) << "the stream goes on";
  clock_.Advance(kSecond);
  sessions[0]->Tick(clock_.NowNs());  // asks
  clock_.Advance(kUnreadSilenceNs + 1);
  sessions[0]->Tick(clock_.NowNs());
  ASSERT_TRUE(turns_.Give(OfNode())) << "the stream's end";
  EXPECT_EQ(StateOf(0), RankState::kLost);
}

TEST_F(AgentTurnsTest, AStreamThatEndsEndsItsRanksAfterTheMessageThatWaits) {
  Attach();
  Open(0);
  ASSERT_TRUE(Soon([&] { return turns_.Held(OfNode()) == 1; }));
  call_.TryCancel();
  stream_->Finish();
  stream_ = nullptr;
  ASSERT_TRUE(turns_.Give(OfNode()));
  EXPECT_EQ(StateOf(0), RankState::kLive);
  ASSERT_TRUE(turns_.Give(OfNode()));
  EXPECT_EQ(StateOf(0), RankState::kLost);
}

TEST_F(AgentTurnsTest, ADaemonThatStopsDropsTheMessagesThatWait) {
  Attach();
  Open(0);
  ASSERT_TRUE(Soon([&] { return turns_.Held(OfNode()) == 1; }));
  peer_turns_.Stop();
  shut_down_ = true;
  std::thread stops([&] { server_->Shutdown(); });  // until every stream has ended
  EXPECT_TRUE(turns_.Give(OfNode()));
  EXPECT_TRUE(turns_.Give(OfNode())) << "the end";
  stops.join();
  EXPECT_TRUE(node_.jobs.Jobs().empty());
}

// Such a message, too, is parsed in a turn of its user.
TEST_F(AgentTurnsTest, LongBytesThatAreNoMessageEndTheStreamInTheirTurn) {
  Attach();
  WriteNoMessage(20'000);
  ASSERT_TRUE(turns_.Give(OfNode()));
  ExpectRefused("bytes that are no message");
}

TEST_F(AgentTurnsTest, ShortBytesThatAreNoMessageEndTheStreamInTheirTurn) {
  Attach();
  WriteNoMessage(200);
  ASSERT_TRUE(turns_.Give(OfNode()));
  ExpectRefused("bytes that are no message");
}

// All strangers have turns together.
TEST_F(AgentTurnsTest, ALongMessageOfAStrangerIsRefusedUnparsed) {
  WriteNoMessage(20'000);
  ASSERT_TRUE(turns_.Give(kStrangers));
  ExpectRefused("the first message is not Hello");
}

// The kernel does not say who the caller is.
class LocalStrangerTurnsTest : public AgentTurnsTest {
 protected:
  LocalStrangerTurnsTest() {
    node_.context.caller_key = [](const std::string& /*caller*/) { return CallerKey(); };
  }
};

// To find out who they are takes time.
TEST_F(LocalStrangerTurnsTest, OtherStrangersDoNotWaitForUnknownCallersOfThisMachine) {
  ASSERT_TRUE(stream_->Write(HelloOf(kUser.uid)));
  ASSERT_TRUE(turns_.Give(LocalStrangers()));
  v1::AttachResponse response;
  ASSERT_TRUE(stream_->Read(&response));
  EXPECT_TRUE(response.has_welcome());
  EXPECT_EQ(turns_.Held(kStrangers), 0u);
}

// ---- On an agent

// Runs a script on the stream of an agent. The stream ends when the script returns.
class ScriptedCoordinator final : public v1::Peer::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::AttachResponse, v1::AttachRequest>;

  explicit ScriptedCoordinator(std::function<void(Stream*)> script) : script_(std::move(script)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~ScriptedCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  grpc::Status Attach(grpc::ServerContext* /*context*/, Stream* stream) override {
    script_(stream);
    return grpc::Status::OK;
  }

  const std::function<void(Stream*)> script_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class LinkTurnsTest : public testing::Test {
 protected:
  void TearDown() override {
    peer_turns_.Stop();
    turns_.Free();
    if (link_ != nullptr) link_->Cancel();
    link_ = nullptr;
    EXPECT_TRUE(EndSoon(streams_));
    queue_.Shutdown();
    reads_.join();
  }

  // Dials a coordinator, for a rank that joins.
  void Dial(const std::string& address) {
    LinkContext context;
    context.counted = streams_.Add();
    context.payer = kUser;
    context.instance = std::string(kInstanceBytes, 'b');
    context.node_name = "beta";
    context.turns = &peer_turns_;
    context.executor = &executor_;
    context.reaper = &reaper_;
    context.clock = &clock_;
    context.tls = true;  // otherwise the kernel is asked who answers
    context.sockets = sockets_;
    context.engine_rate = std::make_shared<UserRate>(/*burst=*/64);
    const JobKey key{kUser.uid, "job", ""};
    link_ = CoordinatorLink::Create(context, address, key);
    JoinRequest join;
    join.key = key;
    join.rank = 1;
    join.world_size = 2;
    join.incarnation = 42;
    join.patience_ns = kRankPatienceNs;
    join.message = std::make_shared<const v1::OpenSession>(
        OpenOf(1, 42, 2).rank_request().request().open_session());
    ASSERT_TRUE(link_->Join(join, std::make_shared<RecordingSink>(), [](const auto&) {}));
    link_->Dial(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()), &queue_);
  }

  ManualClock clock_;
  PeerTurns peer_turns_{&clock_, &turns_};
  HeldTurns turns_;  // after peer_turns_, which its last tasks use
  FairExecutor executor_{1};
  ConcurrentExecutor reaper_{1};
  StreamCount streams_;
  const std::shared_ptr<DialedSockets> sockets_ =
      std::make_shared<DialedSockets>(/*plain_text=*/false);
  std::shared_ptr<CoordinatorLink> link_;
  grpc::CompletionQueue queue_;
  std::thread reads_{[this] {
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) static_cast<Completion*>(tag)->Run(ok);
  }};
};

// Reads the agent's messages until a pong of this number. False: the stream has ended.
bool AwaitPong(ScriptedCoordinator::Stream* stream, std::uint64_t number) {
  v1::AttachRequest message;
  while (stream->Read(&message)) {
    if (message.has_pong() && message.pong().number() == number) return true;
  }
  return false;
}

// Reads the agent's messages until a rank joins. False: the stream has ended.
bool AwaitOpen(ScriptedCoordinator::Stream* stream) {
  v1::AttachRequest message;
  while (stream->Read(&message)) {
    if (message.rank_request().request().has_open_session()) return true;
  }
  return false;
}

// Returns when the test ends the stream. Earlier that end would have a turn among the others.
void AwaitEnd(ScriptedCoordinator::Stream* stream) {
  for (v1::AttachRequest message; stream->Read(&message);) {
  }
}

v1::AttachResponse Welcome() {
  v1::AttachResponse message;
  message.mutable_welcome()->set_instance(std::string(kInstanceBytes, 'a'));
  message.mutable_welcome()->set_node_name("alpha");
  return message;
}

// What a script says. False if it does not say it soon.
bool Said(std::promise<bool>* promise) {
  auto said = promise->get_future();
  const auto state = said.wait_for(std::chrono::milliseconds(kPatienceMs));
  return state == std::future_status::ready && said.get();
}

TEST_F(LinkTurnsTest, NeitherSideIsSilentWhileAMessageWaits) {
  std::promise<bool> lives, answers;
  ScriptedCoordinator fake([&](ScriptedCoordinator::Stream* stream) {
    stream->Write(Welcome());
    v1::AttachResponse message;
    message.mutable_engine_end()->set_epoch(1);
    stream->Write(message);
    lives.set_value(AwaitPong(stream, 0));
    message.mutable_ping()->set_number(7);
    stream->Write(message);
    answers.set_value(AwaitPong(stream, 7));
    AwaitEnd(stream);
  });
  Dial(fake.address());
  ASSERT_TRUE(turns_.Give(kUser)) << "the Welcome";
  ASSERT_TRUE(Soon([&] { return turns_.Held(kUser) == 1; })) << "EngineEnd waits";
  for (int second = 0; second < 20; ++second) {
    clock_.Advance(kSecond);
    link_->Tick(clock_.NowNs());
  }
  EXPECT_FALSE(link_->ended());
  EXPECT_TRUE(Said(&lives)) << "although it reads no ping";
  ASSERT_TRUE(turns_.Give(kUser));
  EXPECT_TRUE(Said(&answers));
  EXPECT_EQ(turns_.Held(kUser), 0u) << "a ping needs no turn";
}

// gRPC's threads may be busy with another connection.
TEST_F(LinkTurnsTest, ACoordinatorWhoseBytesNobodyHasReadIsNotSilent) {
  std::promise<bool> joins;
  ScriptedCoordinator fake([&](ScriptedCoordinator::Stream* stream) {
    stream->Write(Welcome());
    joins.set_value(AwaitOpen(stream));
    AwaitEnd(stream);
  });
  Dial(fake.address());
  ASSERT_TRUE(turns_.Give(kUser)) << "the Welcome";
  ASSERT_TRUE(Said(&joins));
  // A connection of the channel with bytes that nobody reads.
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Descriptor unread(ends[0]), sender(ends[1]);
  ASSERT_TRUE(sockets_->Add(unread.get()));
  ASSERT_EQ(send(sender.get(), "x", 1, 0), 1);
  for (int second = 0; second < 15; ++second) {
    clock_.Advance(kSecond);
    link_->Tick(clock_.NowNs());
    ASSERT_FALSE(link_->ended()) << "after " << second + 1 << " s";
  }
  for (int second = 0; second < 3; ++second) {
    clock_.Advance(kSecond);
    link_->Tick(clock_.NowNs());
  }
  EXPECT_TRUE(turns_.Give(kUser)) << "the stream's end";
  EXPECT_TRUE(link_->ended());
}

// The coordinator pings from its Welcome on, and the rank waits until the Welcome is handled.
TEST_F(LinkTurnsTest, NeitherSideIsSilentWhileTheWelcomeWaits) {
  std::promise<bool> lives, joins;
  ScriptedCoordinator fake([&](ScriptedCoordinator::Stream* stream) {
    stream->Write(Welcome());
    lives.set_value(AwaitPong(stream, 0));
    joins.set_value(AwaitOpen(stream));
    AwaitEnd(stream);
  });
  Dial(fake.address());
  ASSERT_TRUE(Soon([&] { return turns_.Held(kUser) == 1; })) << "the Welcome waits";
  clock_.Advance(2 * kRankPatienceNs);
  link_->Tick(clock_.NowNs());
  ASSERT_TRUE(Said(&lives)) << "although it reads no ping";
  EXPECT_FALSE(link_->ended());
  ASSERT_TRUE(turns_.Give(kUser));
  EXPECT_TRUE(Said(&joins)) << "although its patience has ended";
}

}  // namespace
}  // namespace gradsync::daemon
