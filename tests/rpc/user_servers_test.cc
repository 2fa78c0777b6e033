#include "daemon/rpc/user_servers.h"

#include <fcntl.h>
#include <grpc/grpc.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/base/fair_executor.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/job/job_port.h"
#include "daemon/job/job_table.h"
#include "daemon/rpc/node_status_source.h"
#include "daemon/rpc/session_handler.h"
#include "gradsync/v1/gradsync.grpc.pb.h"
#include "gradsync/v1/introspection.grpc.pb.h"
#include "proto/gradsync/limits.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/attack/raw_http2.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"
#include "tests/kit/gate.h"
#include "tests/kit/soon.h"
#include "tests/session/session_fixture.h"

namespace gradsync::daemon {
namespace {

using Stub = v1::Introspection::Stub;

constexpr uid_t kAlice = 54321, kBob = 54322, kCarol = 54323;
// Memory of an answer to GetStatus, at least: of its warnings, which have 3 bytes each on the wire.
// An answer to GetStats is short.
constexpr std::uint64_t kLongAnswer = 2 << 20;
constexpr std::size_t kWarnings = kLongAnswer / (sizeof(std::string) + sizeof(void*));
constexpr std::uint64_t kControlQuota = kLongAnswer * 5 / 2;
constexpr char kOption[] = "quota_control_bytes_per_user";

// A caller that asks for the time waits until the gate opens.
class GatedClock final : public Clock {
 public:
  // Both outlive it.
  GatedClock(const Clock* clock, Gate* gate) : clock_(clock), gate_(gate) {}
  std::uint64_t NowNs() const override {
    gate_->Wait();
    return clock_->NowNs();
  }

 private:
  const Clock* const clock_;
  Gate* const gate_;
};

// Whoever asks for the jobs of other nodes waits until the gate opens.
class GatedNodes final : public NodeStatusSource {
 public:
  // `gate` outlives it.
  explicit GatedNodes(Gate* gate) : gate_(gate) {}
  JobNodes NodesOf(const Job&) override { return {}; }
  std::vector<RemoteJobSnapshot> RemoteJobs(RemoteJobFilter) override {
    asked_.Open();
    gate_->Wait();
    return {};
  }
  // Waits until somebody asks for them.
  void AwaitQuestion() { asked_.Wait(); }

 private:
  Gate* const gate_;
  Gate asked_;
};

class UserServersTest : public SessionFixture {
 protected:
  UserServersTest() : UserServersTest(UserServers::kWatchPeriod) {
    streams_begin_.Open();
    answers_go_on_.Open();
  }
  // The caller opens streams_begin_: until then the server takes one call of GradientSync, and the
  // others wait in gRPC. It also opens answers_go_on_: until then GetStatus is not answered.
  explicit UserServersTest(std::chrono::milliseconds watch_period)
      : servers_(MakeEnvironment(watch_period)) {}

  // Both ends of a connection.
  struct Connection {
    Tenant user;
    Connections::Admitted server;
    UniqueFd client;
  };

  // As the daemon, without a grpc_shutdown(): the last one may wait for 10 s.
  static void SetUpTestSuite() { grpc_init(); }
  void TearDown() override {
    streams_begin_.Open();
    answers_go_on_.Open();
    servers_.Stop();
    SessionFixture::TearDown();
  }

  Connection Make(uid_t user) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    auto admitted = connections_.Admit(UniqueFd(ends[0]), Client(user));
    EXPECT_TRUE(admitted.ok()) << admitted.status();
    return {Tenant(user), *std::move(admitted), UniqueFd(ends[1])};
  }
  // gRPC's first write waits in the kernel until the client closes its end.
  Connection MakeStuck(uid_t user) {
    Connection connection = Make(user);
    const int server = connection.server.for_grpc.get();
    const std::string bytes(4096, 'x');
    while (send(server, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    }
    EXPECT_EQ(fcntl(server, F_SETFL, 0), 0);  // it blocks
    return connection;
  }
  void HandOver(Connection* connection) {
    EXPECT_TRUE(servers_.Connect(std::move(connection->server), connection->user).ok());
  }
  // The client's end of a connection of the user.
  UniqueFd Connect(uid_t user) {
    Connection connection = Make(user);
    HandOver(&connection);
    return std::move(connection.client);
  }

  static std::unique_ptr<Stub> StubOf(UniqueFd client) {
    return v1::Introspection::NewStub(grpc::CreateInsecureChannelFromFd("test", client.release()));
  }
  template <class Request, class Response>
  static grpc::Status Ask(Stub* stub, grpc::Status (Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*)) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
    Response response;
    return (stub->*method)(&context, Request(), &response);
  }

  std::uint64_t Charged(uid_t user) const { return control_quota_.bytes_of(Tenant(user)); }

  Gate streams_begin_;
  const GatedClock stream_clock_{&clock_, &streams_begin_};
  Gate answers_go_on_;
  GatedNodes nodes_{&answers_go_on_};
  ArenaQuota gpu_quota_{1 << 20};
  ArenaQuota control_quota_{kControlQuota, kOption, "memory"};
  ArenaQuota engine_quota_{1 << 20};
  DescriptorQuota descriptors_{100};
  Connections connections_{&descriptors_};
  FairExecutor answerer_{2};
  SerialExecutor reaper_;
  UserServers servers_;

 private:
  UserServers::Environment MakeEnvironment(std::chrono::milliseconds watch_period) {
    UserServers::Environment environment;
    environment.watch_period = watch_period;
    environment.sessions.sessions = &sessions_;
    environment.sessions.clock = &stream_clock_;
    environment.sessions.memory = &control_quota_;
    environment.introspection.sessions = &sessions_;
    environment.introspection.jobs = &jobs_;
    environment.introspection.quota = &quota_;
    environment.introspection.gpu_quota = &gpu_quota_;
    environment.introspection.control_quota = &control_quota_;
    environment.introspection.engine_quota = &engine_quota_;
    environment.introspection.clock = &clock_;
    environment.introspection.nodes = &nodes_;
    environment.introspection.warnings.assign(kWarnings, "w");
    environment.connections = &connections_;
    environment.answerer = &answerer_;
    environment.reaper = &reaper_;
    return environment;
  }
};

// ---- Long answers

TEST_F(UserServersTest, LongAnswerIsChargedUntilItsCallHasEnded) {
  // Takes no byte of the answer.
  auto silent = std::make_unique<attack::RawHttp2>(Descriptor(Connect(kAlice).release()),
                                                   /*window=*/0);
  ASSERT_TRUE(silent->Call("/gradsync.v1.Introspection/GetStatus", ""));
  EXPECT_TRUE(Soon([&] { return Charged(kAlice) >= kLongAnswer; }));
  silent = nullptr;  // the connection closes
  EXPECT_TRUE(Soon([&] { return Charged(kAlice) == 0; }));

  const grpc::Status answered = Ask(StubOf(Connect(kAlice)).get(), &Stub::GetStatus);
  EXPECT_TRUE(answered.ok()) << answered.error_message();
  EXPECT_TRUE(Soon([&] { return Charged(kAlice) == 0; }));
}

TEST_F(UserServersTest, LongAnswerIsRefusedIfItDoesNotFitTheQuota) {
  const auto held = control_quota_.Reserve(Tenant(kAlice), kControlQuota);
  ASSERT_TRUE(held.ok());
  const auto stub = StubOf(Connect(kAlice));
  const grpc::Status refused = Ask(stub.get(), &Stub::GetStatus);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(absl::StrContains(refused.error_message(), kOption)) << refused.error_message();
  EXPECT_TRUE(absl::StrContains(refused.error_message(), "Ask about one job"))
      << refused.error_message();
  EXPECT_TRUE(Ask(stub.get(), &Stub::GetStats).ok()) << "a short answer is free";
  EXPECT_TRUE(Ask(StubOf(Connect(kBob)).get(), &Stub::GetStatus).ok()) << "Bob has a quota, too";
}

// ---- Status

TEST_F(UserServersTest, StatusShowsTheConnectionAndTheCallOfItsAsker) {
  const auto stub = StubOf(Connect(kAlice));
  connections_.CountRefused(Tenant(kAlice));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
  v1::GetStatusResponse status;
  const grpc::Status answered = stub->GetStatus(&context, v1::GetStatusRequest(), &status);
  ASSERT_TRUE(answered.ok()) << answered.error_message();
  ASSERT_EQ(status.users_size(), 1);
  EXPECT_EQ(status.users(0).uid(), kAlice);
  EXPECT_EQ(status.users(0).connections(), 1u);
  EXPECT_EQ(status.users(0).calls(), 1u);
  EXPECT_EQ(status.users(0).connections_refused(), 1u);
}

// ---- Streams that open no session

// A stream of a trainer that says nothing.
class SilentStream {
 public:
  // `stub` outlives it.
  explicit SilentStream(v1::GradientSync::Stub* stub) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::milliseconds(kPatienceMs));
    stream_ = stub->Session(&context_);
  }
  ~SilentStream() {
    context_.TryCancel();
    if (!ended_) End();
  }
  SilentStream(const SilentStream&) = delete;
  SilentStream& operator=(const SilentStream&) = delete;

  // Says that nothing comes. CANCELLED, unless the server has refused the stream.
  grpc::StatusCode Close() {
    stream_->WritesDone();
    return End();
  }
  // Waits until the server ends it.
  grpc::StatusCode End() {
    v1::SessionResponse response;
    while (stream_->Read(&response)) {
    }
    ended_ = true;
    return stream_->Finish().error_code();
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  bool ended_ = false;
};

using SilentStreams = std::vector<std::unique_ptr<SilentStream>>;

TEST_F(UserServersTest, StreamsThatOpenNoSessionEndAfterThirtySecondsAndLeaveTheirPlaces) {
  constexpr std::uint64_t kOpenPatienceNs = 30 * kSecondNs;
  const std::size_t most = 2 * Policy().quota_sessions_per_user;
  const auto stub = v1::GradientSync::NewStub(
      grpc::CreateInsecureChannelFromFd("test", Connect(kAlice).release()));
  const auto open_most = [&] {
    SilentStreams streams;
    while (streams.size() < most) streams.push_back(std::make_unique<SilentStream>(stub.get()));
    return streams;
  };
  // The server takes the streams of a connection in their order.
  const SilentStreams streams = open_most();
  EXPECT_EQ(SilentStream(stub.get()).Close(), grpc::StatusCode::RESOURCE_EXHAUSTED);

  clock_.Advance(kOpenPatienceNs);
  servers_.Tick(clock_.NowNs());
  EXPECT_EQ(SilentStream(stub.get()).Close(), grpc::StatusCode::RESOURCE_EXHAUSTED)
      << "they still have time";
  clock_.Advance(1);
  servers_.Tick(clock_.NowNs());
  for (const auto& stream : streams) EXPECT_EQ(stream->End(), grpc::StatusCode::CANCELLED);

  // The server gives a place back a moment after the client learns of the end.
  EXPECT_TRUE(Soon([&] {
    const SilentStreams next = open_most();
    return std::all_of(next.begin(), next.end(), [](const auto& stream) {
      return stream->Close() == grpc::StatusCode::CANCELLED;
    });
  })) << "the user has all its places again";
}

// ---- Hand-overs

// A hand-over lasts for as long as the client likes. Two threads for all users would not do.
TEST_F(UserServersTest, HandOverThatDoesNotEndDelaysNoOtherUser) {
  Connection alices = MakeStuck(kAlice), bobs = MakeStuck(kBob);
  Connection alices_next = Make(kAlice), carols = Make(kCarol);
  std::thread acceptor([&] {
    for (Connection* const one : {&alices, &bobs, &alices_next, &carols}) HandOver(one);
  });
  std::atomic<bool> alice_answered{false};
  std::thread alice([&, stub = StubOf(std::move(alices_next.client))] {
    EXPECT_TRUE(Ask(stub.get(), &Stub::GetStats).ok());
    alice_answered = true;
  });
  grpc::Status answered;
  {
    const auto carol = StubOf(std::move(carols.client));
    for (int i = 0; i < 10 && answered.ok(); ++i) answered = Ask(carol.get(), &Stub::GetStats);
  }
  EXPECT_TRUE(answered.ok()) << answered.error_message();
  EXPECT_FALSE(alice_answered) << "her hand-over lasts";
  alices.client.reset();
  bobs.client.reset();
  alice.join();
  acceptor.join();
}

class UnwatchedUserServersTest : public UserServersTest {
 protected:
  UnwatchedUserServersTest() : UserServersTest(std::chrono::hours(1)) {}

  bool AliceIsRefused() const {
    const auto users = connections_.Users();
    const auto alice = users.find(Tenant(kAlice));
    return alice != users.end() && alice->second.refused > 0;
  }
};

// No stream begins, so no call ends: each connection adds some 200 open calls. Alice may have as
// many connections as bring several times the calls that she may have.
TEST_F(UnwatchedUserServersTest, CallsThatConnectionsHaveBroughtAreSeenWhenTheNextOneComes) {
  std::vector<attack::RawHttp2> clients;
  while (!AliceIsRefused() && !connections_.IsFull(Tenant(kAlice))) {
    Connection connection = Make(kAlice);
    auto& client = clients.emplace_back(Descriptor(connection.client.release()), 65535);
    client.OpenMany("/gradsync.v1.GradientSync/Session");
    HandOver(&connection);
    // Otherwise the last connection could come before gRPC has read the calls of the first ones.
    ASSERT_TRUE(Soon([&] { return client.unsent() == 0; }));
  }
  EXPECT_TRUE(AliceIsRefused());
}

// ---- The end

// gRPC's server waits until each connection's write has ended. The client never reads.
TEST_F(UserServersTest, ClientThatReadsNothingDoesNotHoldTheStop) {
  UniqueFd connected = Connect(kAlice);
  ASSERT_EQ(fcntl(connected.get(), F_SETFL, 0), 0);  // it blocks
  attack::RawHttp2 client(Descriptor(connected.release()), 65535);
  ASSERT_TRUE(client.PingUntilStalled());
  std::atomic<bool> stopped{false};
  std::thread stop([&] {
    servers_.Stop();
    stopped = true;
  });
  EXPECT_TRUE(Soon([&] { return stopped.load(); }));
  { const attack::RawHttp2 ends = std::move(client); }
  stop.join();
}

class LateAnswerTest : public UserServersTest {
 protected:
  LateAnswerTest() : UserServersTest(UserServers::kWatchPeriod) { streams_begin_.Open(); }
};

// The stop waits for kStopPatience, and then goes on. AddressSanitizer sees what the answer uses.
TEST_F(LateAnswerTest, AnswerMayComeAfterItsServerHasEnded) {
  const auto stub = StubOf(Connect(kAlice));
  std::thread alice([&] { EXPECT_FALSE(Ask(stub.get(), &Stub::GetStatus).ok()); });
  nodes_.AwaitQuestion();
  servers_.Stop();
  alice.join();
  Gate answered;
  answerer_.Run(Tenant(kAlice), [&] { answered.Open(); });  // after the answer
  answers_go_on_.Open();
  answered.Wait();
  EXPECT_EQ(Charged(kAlice), 0u);
}

// Joins a rank when the test says so. Another node may take as long.
class LateFinder final : public JobFinder {
 public:
  void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
            std::function<void(absl::StatusOr<Joined>)> joined) override {
    request_ = request;
    sink_ = std::move(sink);
    joined_ = std::move(joined);
  }
  void JoinNow(JobTable* jobs) { jobs->Join(request_, std::move(sink_), std::move(joined_)); }

 private:
  JoinRequest request_;
  std::shared_ptr<SessionSink> sink_;
  std::function<void(absl::StatusOr<Joined>)> joined_;
};

// Keeps the answers to a trainer.
class RecordingReplies final : public SessionReplies {
 public:
  void Queue(SessionMessage) override {}
  void Flush() override {}
  void Respond(v1::SessionResponse response) override { answers_.push_back(std::move(response)); }
  absl::Status TryRespond(v1::SessionResponse response) override {
    Respond(std::move(response));
    return absl::OkStatus();
  }
  const std::vector<v1::SessionResponse>& answers() const { return answers_; }

 private:
  std::vector<v1::SessionResponse> answers_;
};

TEST_F(UserServersTest, SessionMayOpenAfterItsServerHasEnded) {
  LateFinder finder;
  sessions_.JoinThrough(&finder);
  SessionContext context;
  context.sessions = &sessions_;
  context.clock = &clock_;
  const auto replies = std::make_shared<RecordingReplies>();
  const auto handler = std::make_shared<SessionHandler>(context, Client(), replies);
  v1::SessionRequest request;
  v1::OpenSession* const open = request.mutable_open_session();
  open->mutable_protocol()->set_oldest(kProtocolOldest);
  open->mutable_protocol()->set_newest(kProtocolNewest);
  open->set_shared_memory_abi(kSharedMemoryAbi);
  open->set_job_id("run");
  open->set_world_size(1);
  handler->Handle(request);
  context = SessionContext();  // as if it had ended with the server
  finder.JoinNow(&jobs_);
  sessions_.JoinThrough(&jobs_);
  ASSERT_EQ(replies->answers().size(), 1u);
  EXPECT_TRUE(replies->answers().front().has_session_opened());
}

}  // namespace
}  // namespace gradsync::daemon
