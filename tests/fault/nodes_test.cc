// A job that spans nodes: two daemons, each on a loopback address of its own, and real trainers.
// Runs outside Bazel's sandbox: inside it root cannot become another user.

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gradsync/v1/peer.grpc.pb.h"
#include "gtest/gtest.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"
#include "tests/kit/soon.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::fault {
namespace {

// Every node learns of a loss within this time.
constexpr std::uint64_t kNodeLossBoundNs = 1'000'000'000;

class NodesTest : public testing::Test, public TwoNodes {
 protected:
  static std::size_t EnginesMade(const TestDaemon& daemon) {
    const std::string log = daemon.Log();
    std::size_t count = 0;
    for (std::size_t at = 0; (at = log.find("nodes meet", at)) != std::string::npos; ++at) ++count;
    return count;
  }
};

TEST_F(NodesTest, EveryRankJoinsOneJobAndLeavesIt) {
  const Trainers trainers = Join();
  const auto status = alpha().Status();
  ASSERT_EQ(status.jobs_size(), 1);
  ASSERT_EQ(status.jobs(0).sessions_size(), 4);
  EXPECT_EQ(status.jobs(0).sessions(1).node(), "");
  EXPECT_EQ(status.jobs(0).sessions(3).node(), "beta");
  EXPECT_EQ(beta().Status().jobs_size(), 0) << "only the coordinator holds the job";
  ExpectAll(trainers, "leave");
  for (const auto& trainer : trainers) EXPECT_EQ(trainer->Quit(), 0);
  EXPECT_TRUE(alpha().AwaitStatus([](const auto& now) {
    return now.jobs_size() == 1 && now.jobs(0).state() == v1::JOB_STATE_ENDED;
  }));
}

// Hold needs every rank on one node. Rank 0 holds too, or it does not.
TEST_F(NodesTest, HoldIsRefusedByNameOnAnotherNode) {
  for (const char* first_options : {"policy=hold", ""}) {
    const auto first = MakeRank(0, 3, first_options);
    const auto other = MakeRank(2, 3, "policy=hold");
    const Reply joined = first->Join();
    ASSERT_TRUE(joined.ok()) << joined;
    const Reply refused = other->Join();
    EXPECT_EQ(refused.code, "UNIMPLEMENTED") << refused;
    EXPECT_EQ(refused.reason, "LOSS_POLICY") << refused;
    EXPECT_TRUE(absl::StrContains(refused.message, "rank 2 on node beta")) << refused;
    first->Quit();
  }
}

TEST_F(NodesTest, StepsAreReducedOverBothNodes) {
  const Trainers trainers = Join();
  for (const char* dtype : {"float32", "float64", "float16", "bfloat16"}) {
    const std::string layout = std::string(" layout=") + dtype;
    ExpectAll(trainers, "register buckets=3 count=5000 dtype=" + std::string(dtype) + layout);
    ExpectAll(trainers, "step times=3" + layout);
  }
  ExpectAll(trainers, "register buckets=2 count=3000000 layout=large op=sum");
  ExpectAll(trainers, "step times=3 layout=large");
  EXPECT_EQ(EnginesMade(alpha()), 1u);
  ExpectAll(trainers, "leave");
}

// Its messages are cut into parts by the library, and the agent passes them on.
TEST_F(NodesTest, LongLayoutComesInPartsFromEveryNode) {
  const Trainers trainers = Join();
  std::string parameters = "w:1";
  for (int i = 0; i < 8'000; ++i) parameters += ",parameter" + std::to_string(i) + ":1";
  ExpectAll(trainers, "register parameters=" + parameters);
  ExpectAll(trainers, "step");
  ExpectAll(trainers, "leave");
}

TEST_F(NodesTest, IntegersMinimaAndMaximaAreReducedOverBothNodes) {
  const Trainers trainers = Join();
  const auto expect = [&](const std::string& op, const std::string& dtype) {
    const std::string layout = " layout=" + op + dtype;
    ExpectAll(trainers, "register buckets=2 count=5003 dtype=" + dtype + " op=" + op + layout);
    ExpectAll(trainers, "step times=2" + layout);
    ExpectAll(trainers, "allreduce 1001 dtype=" + dtype + " op=" + op);
  };
  for (const char* dtype : {"int8", "uint8", "int16", "int32", "int64"}) {
    for (const char* op : {"sum", "min", "max"}) expect(op, dtype);
  }
  for (const char* dtype : {"float32", "float64", "float16", "bfloat16"}) {
    for (const char* op : {"min", "max"}) expect(op, dtype);
  }
  // Several chunks.
  ExpectAll(trainers, "register buckets=2 count=3000000 layout=large op=min");
  ExpectAll(trainers, "step times=2 layout=large");
  // The node of ranks 2 and 3 has no rank left, and brings nothing.
  for (const int rank : {2, 3}) ASSERT_TRUE(trainers[rank]->Do("leave").ok());
  for (const char* layout : {"minint32", "maxint8", "minfloat32", "maxbfloat16", "sumint64"}) {
    for (const int rank : {0, 1}) {
      trainers[rank]->Send("step ranks=0,1 layout=" + std::string(layout));
    }
    for (const int rank : {0, 1}) {
      const Reply reply = trainers[rank]->Receive();
      EXPECT_TRUE(reply.ok()) << reply;
    }
  }
}

TEST_F(NodesTest, NodesMayHaveDifferentNumbersOfRanks) {
  const Trainers trainers = Join(3);
  ExpectAll(trainers, "register buckets=2 count=1001");
  ExpectAll(trainers, "step times=5");
}

TEST_F(NodesTest, ThreeNodesOfDifferentSizesAgreeInEveryBit) {
  const TestDaemon c(Flags("127.0.0.3", "gamma"));
  Trainers trainers;
  const TestDaemon* const nodes[] = {&alpha(), &beta(), &beta(), &c, &c, &c};
  for (std::uint32_t rank = 0; rank < 6; ++rank) {
    trainers.push_back(
        std::make_unique<Trainer>(*nodes[rank], rank, 6, "job", "coordinator=" + coordinator()));
  }
  JoinAll(trainers);
  ExpectAll(trainers, "register buckets=3 count=40003");
  for (int i = 0; i < 3; ++i) ExpectAll(trainers, "exact_step 1,2,3");
  ExpectAll(trainers, "allreduce 1000");
  ExpectAll(trainers, "broadcast 100000 4");
}

TEST_F(NodesTest, LayoutIsReplacedOnEveryNode) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step times=2");
  ExpectAll(trainers, "replace buckets=5 count=70");
  for (const Reply& reply : DoAll(trainers, "step")) EXPECT_EQ(reply.Field("step"), "3") << reply;
  ExpectAll(trainers, "step times=2");
}

TEST_F(NodesTest, RanksOfEveryNodeLeaveAndRejoin) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  // Rank 3 runs out of data first, rank 1 last.
  trainers[3]->Begin("leave_stay");
  for (const int rank : {0, 1, 2}) trainers[rank]->Send("step ranks=0,1,2");
  for (const int rank : {0, 1, 2}) {
    const Reply reply = trainers[rank]->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
  }
  for (const int rank : {0, 2}) trainers[rank]->Begin("leave_stay");
  trainers[1]->Send("step ranks=1");
  EXPECT_TRUE(trainers[1]->Receive().ok());
  trainers[1]->Begin("leave_stay");
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Result();
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("last_to_leave"), "1") << reply;
  }
  ExpectAll(trainers, "barrier");
  for (const Reply& reply : DoAll(trainers, "step")) EXPECT_EQ(reply.Field("step"), "4") << reply;
}

TEST_F(NodesTest, JobChannelReachesEveryRank) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "barrier");
  ExpectAll(trainers, "allreduce 1000");
  ExpectAll(trainers, "allreduce 77 op=sum dtype=float64");
  ExpectAll(trainers, "broadcast 100000 0");
  ExpectAll(trainers, "broadcast 100000 3");
  // More than the staging memory holds, so it travels in chunks.
  ExpectAll(trainers, "broadcast 70000000 2");
  ExpectAll(trainers, "barrier");
}

TEST_F(NodesTest, RankThatLeftContributesNothing) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  ASSERT_TRUE(trainers[3]->Do("leave").ok());
  for (const int rank : {0, 1, 2}) trainers[rank]->Send("step ranks=0,1,2");
  for (const int rank : {0, 1, 2}) {
    const Reply reply = trainers[rank]->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("live_ranks"), "3");
  }
}

TEST_F(NodesTest, AbandonedStepIsVoidOnEveryNode) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "mark 1 0");
  ASSERT_TRUE(trainers[2]->Do("abandon 1 out of memory").ok());
  for (const Reply& reply : DoAll(trainers, "wait 1")) {
    EXPECT_EQ(reply.reason, "STEP_ABANDONED") << reply;
    EXPECT_EQ(reply.Field("rank"), "2") << reply;
  }
  ExpectAll(trainers, "step times=2");
}

TEST_F(NodesTest, LostTrainerIsReportedOnEveryNodeWithoutANewEngine) {
  // The victims are on both nodes.
  for (const int victim : {3, 0, 2, 1, 3}) {
    const Trainers trainers = Join();
    ExpectAll(trainers, "register buckets=2 count=100");
    ExpectAll(trainers, "step");
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      ASSERT_TRUE(trainers[rank]->Do("mark 2 0").ok());
      ASSERT_TRUE(trainers[rank]->Do("mark 2 1").ok());
      trainers[rank]->Begin("wait 2");
    }
    const std::uint64_t killed_ns = trainers[victim]->Kill();
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      const Reply reply = trainers[rank]->Result();
      EXPECT_EQ(reply.code, "ABORTED") << reply;
      EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
      EXPECT_EQ(reply.Field("rank"), std::to_string(victim)) << reply;
      EXPECT_EQ(reply.Field("bucket"), "0") << reply;
      EXPECT_LE(reply.end_ns - killed_ns, FairBoundNs(kLossBoundNs, killed_ns)) << reply;
    }
  }
  const Trainers again = Join();
  ExpectAll(again, "register buckets=2 count=100");
  ExpectAll(again, "step times=3");
  EXPECT_EQ(EnginesMade(alpha()), 1u) << alpha().Log();
}

TEST_F(NodesTest, LostAgentIsNamedByItsNode) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {0, 1}) trainers[rank]->Begin("wait 2");
  const std::uint64_t killed_ns = beta().Kill();
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_EQ(reply.code, "ABORTED") << reply;
    EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
    EXPECT_NE(reply.message.find("the daemon of its node beta"), std::string::npos) << reply;
    EXPECT_LE(reply.end_ns - killed_ns, FairBoundNs(kNodeLossBoundNs, killed_ns)) << reply;
  }
  for (const int rank : {2, 3}) EXPECT_EQ(trainers[rank]->Do("barrier").reason, "DAEMON_LOST");

  // The daemon starts again, and the job can run again.
  beta().Start();
  const Trainers next = Join();
  ExpectAll(next, "register buckets=2 count=100");
  ExpectAll(next, "step times=2");
}

TEST_F(NodesTest, LostCoordinatorIsNamedByItsAddress) {
  const std::string address = coordinator();
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  trainers[2]->Begin("wait 2");
  ASSERT_TRUE(trainers[3]->Do("mark 2 0").ok());
  ASSERT_TRUE(trainers[3]->Do("mark 2 1").ok());
  ASSERT_TRUE(trainers[3]->Do("end 2").ok());
  // The coordinator answers this after all earlier messages.
  ASSERT_EQ(trainers[3]->Do("wait 2 timeout_ms=1").reason, "WAIT_TIMEOUT");
  trainers[3]->Begin("wait 2");
  const std::uint64_t killed_ns = alpha().Kill();

  const Reply lost = trainers[2]->Result();
  EXPECT_EQ(lost.code, "UNAVAILABLE") << lost;
  EXPECT_EQ(lost.reason, "COORDINATOR_LOST") << lost;
  EXPECT_NE(lost.message.find(address), std::string::npos) << lost;
  EXPECT_LE(lost.end_ns - killed_ns, FairBoundNs(kNodeLossBoundNs, killed_ns)) << lost;
  const Reply doubt = trainers[3]->Result();
  EXPECT_EQ(doubt.code, "ABORTED") << doubt;
  EXPECT_EQ(doubt.reason, "STEP_IN_DOUBT") << doubt;
  EXPECT_NE(doubt.message.find(address), std::string::npos) << doubt;
  EXPECT_LE(doubt.end_ns - killed_ns, FairBoundNs(kNodeLossBoundNs, killed_ns)) << doubt;

  // The daemon starts again, and the job can run again.
  alpha().Start();
  const Trainers next = Join();
  ExpectAll(next, "register buckets=2 count=100");
  ExpectAll(next, "step times=2");
}

TEST_F(NodesTest, JoinFailsInTimeWithoutACoordinator) {
  // A port that was free a moment ago.
  std::string address;
  {
    TestDaemon ended(Flags("127.0.0.3", "gamma"));
    address = ended.Status().peer_address();
  }
  const auto expect = [&](const std::string& coordinator, const char* cause) {
    // On a busy machine the trainer may give up before the daemon has answered.
    Reply reply;
    EXPECT_TRUE(Soon([&] {
      Trainer trainer(beta(), 1, 2, "job",
                      "coordinator=" + coordinator + " connect_timeout_ms=1000");
      reply = trainer.Join();
      return reply.reason != "WAIT_TIMEOUT";
    }));
    EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
    EXPECT_EQ(reply.reason, "COORDINATOR_UNREACHABLE") << reply;
    for (const char* part : {coordinator.c_str(), "node beta", cause}) {
      EXPECT_NE(reply.message.find(part), std::string::npos) << reply;
    }
    EXPECT_LE(reply.end_ns - reply.start_ns, FairBoundNs(3 * kNodeLossBoundNs, reply.start_ns))
        << reply;
  };
  expect(address, "nothing listens there (connection refused)");
  expect("nowhere.invalid:7417", "its name cannot be resolved");
}

// Either the end of the stream or an error of the engine reports the loss. Both name the node.
TEST_F(NodesTest, OwnAddressAsCoordinatorMeansThisNode) {
  // gRPC resolves names with c-ares by default. Debian's leaks memory for each name.
  const TestDaemon c(Flags("127.0.0.1", "gamma"), {"GRPC_DNS_RESOLVER=native"});
  // This is not the text of its own address, so the daemon must resolve it.
  std::string self = c.Status().peer_address();
  self.replace(0, self.find(':'), "localhost");
  const Trainers trainers = JoinedTrainers(c, 2, "here", "coordinator=" + self);
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  EXPECT_EQ(EnginesMade(c), 0u);
}

TEST_F(NodesTest, OwnHostNameAsCoordinatorMeansThisNode) {
  char host[65] = {};
  ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
  std::string self = alpha().Status().peer_address();
  self.replace(0, self.find(':'), host);
  const Trainers trainers = JoinedTrainers(alpha(), 2, "here", "coordinator=" + self);
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  EXPECT_EQ(EnginesMade(alpha()), 0u);
}

TEST_F(NodesTest, OtherNodesContinueAfterANodeLeftAndStopped) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {2, 3}) ASSERT_TRUE(trainers[rank]->Do("leave").ok());
  for (const int rank : {0, 1}) trainers[rank]->Send("step ranks=0,1");
  for (const int rank : {0, 1}) EXPECT_TRUE(trainers[rank]->Receive().ok());
  EXPECT_EQ(beta().Stop(), 0);
  for (const int rank : {0, 1}) trainers[rank]->Send("step ranks=0,1 times=3");
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
  }
}

TEST_F(NodesTest, SilentAgentIsLost) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {0, 1}) trainers[rank]->Begin("wait 2");
  beta().process().Signal(SIGSTOP);
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
    EXPECT_NE(reply.message.find("node beta"), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("answered no ping for 5 s"), std::string::npos) << reply;
    EXPECT_LE(reply.end_ns - reply.start_ns, FairBoundNs(10 * kNodeLossBoundNs, reply.start_ns))
        << reply;
  }
  beta().process().Signal(SIGCONT);
}

TEST_F(NodesTest, SilentCoordinatorIsLost) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {2, 3}) trainers[rank]->Begin("wait 2");
  alpha().process().Signal(SIGSTOP);
  for (const int rank : {2, 3}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_EQ(reply.reason, "COORDINATOR_LOST") << reply;
    EXPECT_NE(reply.message.find("on node alpha"), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("sent nothing for 6 s"), std::string::npos) << reply;
    EXPECT_LE(reply.end_ns - reply.start_ns, FairBoundNs(10 * kNodeLossBoundNs, reply.start_ns))
        << reply;
  }
  alpha().process().Signal(SIGCONT);
}

TEST_F(NodesTest, GarbageOnThePeerPortEndsOnlyItsConnection) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  for (const std::string& garbage :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), std::string(100000, '\xff')}) {
    const Descriptor scanner = ConnectTcp(coordinator());
    ASSERT_GE(scanner.get(), 0);
    (void)send(scanner.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
    // The daemon may answer first, but it ends the connection.
    char answer[4096];
    ssize_t size = 0;
    do {
      ASSERT_TRUE(AwaitReadable(scanner.get(), kPatienceMs));
      size = recv(scanner.get(), answer, sizeof(answer), 0);
    } while (size > 0);
  }
  ExpectAll(trainers, "step times=2");
}

// A client that sends messages in the wrong order gets an error that says so.
TEST_F(NodesTest, StreamWithoutHelloIsRefused) {
  const auto stub =
      v1::Peer::NewStub(grpc::CreateChannel(coordinator(), grpc::InsecureChannelCredentials()));
  const auto end = [&](const std::vector<v1::AttachRequest>& requests) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
    const auto stream = stub->Attach(&context);
    for (const auto& request : requests) stream->Write(request);
    v1::AttachResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  };
  v1::AttachRequest ended;
  ended.mutable_rank_ended()->set_incarnation(7);
  EXPECT_EQ(end({ended}).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(end({v1::AttachRequest()}).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::AttachRequest hello;
  hello.mutable_hello()->set_protocol(1);
  EXPECT_EQ(end({hello}).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  hello.mutable_hello()->set_instance(std::string(16, 'x'));
  hello.mutable_hello()->set_node_name("stranger");
  hello.mutable_hello()->set_job_id("job");
  hello.mutable_hello()->set_staging_bytes(4096);
  const grpc::Status mismatch = end({hello});
  EXPECT_EQ(mismatch.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_NE(mismatch.error_message().find("staging_bytes"), std::string::npos);
  hello.mutable_hello()->set_staging_bytes(32u << 20);
  // A message about an unknown rank is ignored, because the rank may just have ended. A message
  // without a kind is an error.
  v1::AttachRequest open;
  open.mutable_rank_request()->set_incarnation(7);
  open.mutable_rank_request()->mutable_request()->mutable_open_session();
  v1::AttachRequest refuse;
  refuse.mutable_refuse_layout()->set_incarnation(8);
  v1::AttachRequest done;
  done.mutable_launch_done()->set_epoch(9);
  const grpc::Status foreign = end({hello, open, refuse, ended, done, v1::AttachRequest()});
  EXPECT_EQ(foreign.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(foreign.error_message().find("stranger"), std::string::npos);
  EXPECT_NE(foreign.error_message().find("an unknown kind"), std::string::npos);
}

// A foreign or faulty daemon. It attaches correctly, with rank 1 of a job of `world` ranks.
class Stranger {
 public:
  explicit Stranger(const std::string& coordinator, std::uint32_t world = 2)
      : world_(world),
        stub_(v1::Peer::NewStub(
            grpc::CreateChannel(coordinator, grpc::InsecureChannelCredentials()))) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::milliseconds(kPatienceMs));
    stream_ = stub_->Attach(&context_);
    v1::AttachRequest message;
    auto* hello = message.mutable_hello();
    hello->set_protocol(1);
    hello->set_instance(std::string(16, 'x'));
    hello->set_node_name("stranger");
    hello->set_uid(getuid());
    hello->set_job_id("job");
    hello->set_staging_bytes(32u << 20);
    Say(message);
    OpenRank(5);
  }

  void OpenRank(std::uint64_t incarnation, std::uint32_t rank = 1) {
    v1::AttachRequest message;
    auto* open = message.mutable_rank_request()->mutable_request()->mutable_open_session();
    message.mutable_rank_request()->set_rank(rank);
    message.mutable_rank_request()->set_incarnation(incarnation);
    open->mutable_protocol()->set_oldest(1);
    open->mutable_protocol()->set_newest(1);
    open->set_shared_memory_abi(kSharedMemoryAbi);
    open->set_job_id("job");
    open->set_rank(rank);
    open->set_world_size(world_);
    open->mutable_options()->set_divisor(v1::DIVISOR_LIVE_RANKS);
    open->mutable_options()->set_step_timeout_ms(1'800'000);
    Say(message);
  }

  void Say(const v1::AttachRequest& message) { stream_->Write(message); }
  // Returns the next message of this kind, or nothing if the stream ends first.
  std::optional<v1::AttachResponse> Await(v1::AttachResponse::KindCase kind) {
    v1::AttachResponse message;
    while (stream_->Read(&message)) {
      if (message.kind_case() == kind) return message;
    }
    return std::nullopt;
  }
  grpc::Status Finish() {
    v1::AttachResponse message;
    while (stream_->Read(&message)) {
    }
    return stream_->Finish();
  }

 private:
  const std::uint32_t world_;
  const std::unique_ptr<v1::Peer::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream_;
};

TEST_F(NodesTest, EngineThatCannotConnectEndsTheJobAndNamesTheNode) {
  Trainer trainer(alpha(), 0, 2, "job", "coordinator=" + coordinator());
  ASSERT_TRUE(trainer.Join().ok());
  Stranger stranger(coordinator());
  const auto connect = stranger.Await(v1::AttachResponse::kConnectEngine);
  ASSERT_TRUE(connect.has_value());
  EXPECT_EQ(connect->connect_engine().node(), 1u);
  trainer.Begin("barrier");
  v1::AttachRequest failed;
  // This epoch does not exist, so the message is ignored.
  failed.mutable_launch_done()->set_epoch(1000);
  failed.mutable_launch_done()->mutable_status()->set_code(14);
  stranger.Say(failed);
  failed.mutable_launch_done()->set_epoch(connect->connect_engine().epoch());
  failed.mutable_launch_done()->mutable_status()->set_message("no interface eth7");
  stranger.Say(failed);
  EXPECT_TRUE(stranger.Await(v1::AttachResponse::kEngineEnd).has_value());
  const Reply reply = trainer.Result();
  EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
  EXPECT_EQ(reply.reason, "ENGINE_FAILED") << reply;
  EXPECT_NE(reply.message.find("no interface eth7"), std::string::npos) << reply;
}

TEST_F(NodesTest, SecondLaunchDoneDisconnectsItsNode) {
  Trainer trainer(alpha(), 0, 2, "job", "coordinator=" + coordinator());
  ASSERT_TRUE(trainer.Join().ok());
  Stranger stranger(coordinator());
  const auto connect = stranger.Await(v1::AttachResponse::kConnectEngine);
  ASSERT_TRUE(connect.has_value());
  trainer.Begin("barrier");
  v1::AttachRequest done;
  done.mutable_launch_done()->set_epoch(connect->connect_engine().epoch());
  done.mutable_launch_done()->set_sequence(7);
  stranger.Say(done);
  const grpc::Status end = stranger.Finish();
  EXPECT_EQ(end.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(end.error_message().find("node stranger answered launch 7"), std::string::npos)
      << end.error_message();
  const Reply reply = trainer.Result();
  EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
  EXPECT_NE(reply.message.find("stranger"), std::string::npos) << reply;
}

TEST_F(NodesTest, UnrequestedGpuArenaEndsItsRank) {
  Trainer trainer(alpha(), 0, 2, "job", "coordinator=" + coordinator());
  ASSERT_TRUE(trainer.Join().ok());
  Stranger stranger(coordinator());
  ASSERT_TRUE(stranger.Await(v1::AttachResponse::kConnectEngine).has_value());
  trainer.Begin("barrier");
  v1::AttachRequest message;
  // This rank and this worker do not exist, so the messages are ignored.
  message.mutable_gpu_arena_mapped()->set_incarnation(1000);
  stranger.Say(message);
  message.mutable_worker_reply()->set_worker(9);
  stranger.Say(message);
  message.mutable_gpu_arena_mapped()->set_incarnation(5);
  message.mutable_gpu_arena_mapped()->set_channel(1);
  message.mutable_gpu_arena_mapped()->set_device("GPU-0");
  stranger.Say(message);
  const auto ending = stranger.Await(v1::AttachResponse::kRankResponse);
  const Reply reply = trainer.Result();
  EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
  EXPECT_NE(reply.message.find("no layout on channel 1"), std::string::npos) << reply;
  // Its node stays connected until it sends an invalid message.
  message.mutable_worker_ended()->set_worker(9);
  stranger.Say(message);
  EXPECT_EQ(stranger.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(NodesTest, GpuArenaWithoutADeviceEndsTheStream) {
  Trainer trainer(alpha(), 0, 2, "job", "coordinator=" + coordinator());
  ASSERT_TRUE(trainer.Join().ok());
  Stranger stranger(coordinator());
  ASSERT_TRUE(stranger.Await(v1::AttachResponse::kConnectEngine).has_value());
  v1::AttachRequest message;
  message.mutable_gpu_arena_mapped()->set_incarnation(5);
  message.mutable_gpu_arena_mapped()->set_channel(1);
  stranger.Say(message);
  EXPECT_EQ(stranger.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(NodesTest, DetachBeforeTheNodesMeetEndsTheStream) {
  Stranger stranger(coordinator());  // rank 0 of its job never joins
  v1::AttachRequest message;
  message.mutable_rank_ended()->set_incarnation(5);
  stranger.Say(message);
  message.mutable_detach();
  stranger.Say(message);
  const grpc::Status end = stranger.Finish();
  EXPECT_TRUE(end.ok()) << end.error_message();
}

TEST_F(NodesTest, TooLargeAMessageEndsItsStream) {
  Stranger stranger(coordinator());
  v1::AttachRequest large;
  large.mutable_launch_done()->set_epoch(1000);  // which does not exist
  large.mutable_launch_done()->mutable_status()->set_message(std::string(256 << 10, 'x'));
  stranger.Say(large);
  EXPECT_EQ(stranger.Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(NodesTest, NodeHasABoundOnItsRanksInAJob) {
  attack::Neighbour neighbour(alpha());
  constexpr std::uint32_t kMost = 1024;
  Stranger stranger(coordinator(), 2 * kMost);  // has rank 1
  for (std::uint32_t rank = 2; rank <= kMost + 1; ++rank) stranger.OpenRank(100 + rank, rank);
  std::optional<v1::AttachResponse> answer;
  do {
    answer = stranger.Await(v1::AttachResponse::kRankResponse);
    ASSERT_TRUE(answer.has_value());
  } while (answer->rank_response().response().has_session_opened());
  EXPECT_EQ(answer->rank_response().incarnation(), 100 + kMost + 1);
  EXPECT_NE(answer->rank_response().response().session_ending().status().message().find(
                "node stranger has 1024 ranks"),
            std::string::npos)
      << answer->DebugString();
  neighbour.ExpectUnharmed();
}

TEST_F(NodesTest, DetachingNodeCannotJoinAgain) {
  Trainer trainer(alpha(), 0, 2, "job", "coordinator=" + coordinator());
  ASSERT_TRUE(trainer.Join().ok());
  Stranger stranger(coordinator());
  trainer.Begin("allreduce 100");
  v1::AttachRequest message;
  message.mutable_rank_request()->set_rank(1);
  message.mutable_rank_request()->set_incarnation(5);
  auto* reduce = message.mutable_rank_request()->mutable_request()->mutable_all_reduce();
  reduce->set_sequence(1);
  reduce->set_dtype(v1::DATA_TYPE_FLOAT32);
  reduce->set_count(100);
  reduce->set_op(v1::REDUCE_OP_AVERAGE);
  stranger.Say(message);
  // The node owes the result of this launch, so its detaching cannot finish yet.
  ASSERT_TRUE(stranger.Await(v1::AttachResponse::kLaunch).has_value());
  message.mutable_rank_ended()->set_incarnation(5);
  stranger.Say(message);
  message.mutable_detach();
  stranger.Say(message);
  stranger.OpenRank(6);
  const auto refused = stranger.Await(v1::AttachResponse::kRankResponse);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->rank_response().incarnation(), 6u);
  EXPECT_NE(refused->rank_response().response().session_ending().status().message().find(
                "node stranger is stopping"),
            std::string::npos)
      << refused->DebugString();
}

TEST_F(NodesTest, JobsOfOtherCoordinatorsCountAgainstTheUserQuota) {
  std::vector<std::string> flags = Flags("127.0.0.3", "gamma");
  flags.emplace_back("--quota_jobs_per_user=2");
  const TestDaemon c(flags);
  const auto join = [&](const std::string& job) {
    auto trainer = std::make_unique<Trainer>(c, 1, 2, job, "coordinator=" + coordinator());
    const Reply reply = trainer->Join();
    return std::make_pair(std::move(trainer), reply);
  };
  auto first = join("first");
  const auto second = join("second");
  EXPECT_TRUE(first.second.ok()) << first.second;
  EXPECT_TRUE(second.second.ok()) << second.second;
  const Reply refused = join("third").second;
  EXPECT_EQ(refused.code, "RESOURCE_EXHAUSTED") << refused;
  EXPECT_NE(refused.message.find("quota_jobs_per_user"), std::string::npos) << refused;
  // A job that has ended does not count against the quota.
  first.first->Kill();
  ASSERT_TRUE(c.AwaitStatus([](const auto& now) { return now.remote_jobs_size() == 1; }));
  const Reply taken = join("third").second;
  EXPECT_TRUE(taken.ok()) << taken;
}

TEST_F(NodesTest, DrainingAgentEndsItsSessions) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {0, 1}) trainers[rank]->Begin("wait 2");
  EXPECT_EQ(beta().Stop(), 0);
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
    EXPECT_EQ(reply.Field("node"), "beta") << reply;
    const std::string named = "rank " + reply.Field("rank") + " (node beta) of job";
    EXPECT_NE(reply.message.find(named), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("the daemon of node beta is stopping"), std::string::npos)
        << reply;
  }
  for (const int rank : {2, 3}) {
    const Reply reply = trainers[rank]->Do("wait 3");
    EXPECT_EQ(reply.reason, "DRAINING") << reply;
    EXPECT_EQ(reply.Field("node"), "beta") << reply;
  }
}

TEST_F(NodesTest, DrainingAgentFinishesTheRunningStep) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  ASSERT_TRUE(trainers[2]->Do("mark 2 0").ok());
  ASSERT_TRUE(alpha().AwaitStatus(
      [](const auto& now) { return !now.jobs(0).layouts(0).waiting_for().empty(); }));
  beta().process().Signal(SIGTERM);
  ASSERT_TRUE(
      beta().AwaitStatus([](const auto& now) { return now.state() == v1::DAEMON_STATE_DRAINING; }));
  ASSERT_TRUE(trainers[2]->Do("mark 2 1").ok());
  ASSERT_TRUE(trainers[2]->Do("end 2").ok());
  for (const int rank : {0, 1, 3}) trainers[rank]->Begin("step");
  for (const int rank : {0, 1, 3}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_TRUE(reply.ok()) << reply;
  }
  EXPECT_TRUE(trainers[2]->Do("wait 2").ok());
  EXPECT_EQ(beta().process().Wait(kPatienceMs), 0);
  for (const int rank : {2, 3}) {
    const Reply reply = trainers[rank]->Do("wait 3");
    EXPECT_EQ(reply.reason, "DRAINING") << reply;
  }
}

}  // namespace
}  // namespace gradsync::fault
