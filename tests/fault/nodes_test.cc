// A job that spans nodes: two daemons, each on a loopback address of its own, and real trainers.

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "gradsync/v1/peer.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/fault/deadline.h"
#include "tests/fault/trainer.h"

namespace gradsync::fault {
namespace {

using Trainers = std::vector<std::unique_ptr<Trainer>>;

// A loss must be known on every node within this.
constexpr std::uint64_t kNodeLossBoundNs = 1'000'000'000;

std::vector<std::string> Flags(const std::string& address, const std::string& name) {
  return {"--peer_listen=" + address + ":0", "--node_name=" + name};
}

class NodesTest : public testing::Test {
 protected:
  static constexpr std::uint32_t kPerNode = 2;

  std::string coordinator() const { return a_.Status().peer_address(); }

  std::unique_ptr<Trainer> MakeRank(std::uint32_t rank, std::uint32_t world,
                                    const std::string& options = "") {
    return std::make_unique<Trainer>(rank < kPerNode ? a_ : b_, rank, world, "job",
                                     "coordinator=" + coordinator() + " " + options);
  }

  // Ranks 0 and 1 on node a, the rest on node b.
  Trainers Join(std::uint32_t world = 4) {
    Trainers trainers;
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      trainers.push_back(MakeRank(rank, world));
      trainers.back()->Send(trainers.back()->join());
    }
    for (const auto& trainer : trainers) {
      const Reply reply = trainer->Receive();
      EXPECT_TRUE(reply.ok()) << reply;
    }
    return trainers;
  }

  static std::size_t EnginesMade(const TestDaemon& daemon) {
    const std::string log = daemon.Log();
    std::size_t count = 0;
    for (std::size_t at = 0; (at = log.find("nodes meet", at)) != std::string::npos; ++at) ++count;
    return count;
  }

  TestDaemon a_{Flags("127.0.0.1", "alpha")};
  TestDaemon b_{Flags("127.0.0.2", "beta")};
};

TEST_F(NodesTest, EveryRankJoinsOneJobAndLeavesIt) {
  const Trainers trainers = Join();
  const auto status = a_.Status();
  ASSERT_EQ(status.jobs_size(), 1);
  ASSERT_EQ(status.jobs(0).sessions_size(), 4);
  EXPECT_EQ(status.jobs(0).sessions(1).node(), "");
  EXPECT_EQ(status.jobs(0).sessions(3).node(), "beta");
  EXPECT_EQ(b_.Status().jobs_size(), 0) << "the job lives on its coordinator alone";
  ExpectAll(trainers, "leave");
  for (const auto& trainer : trainers) EXPECT_EQ(trainer->Quit(), 0);
  EXPECT_TRUE(a_.AwaitStatus([](const auto& now) {
    return now.jobs_size() == 1 && now.jobs(0).state() == v1::JOB_STATE_ENDED;
  }));
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
  EXPECT_EQ(EnginesMade(a_), 1u);
  ExpectAll(trainers, "leave");
}

TEST_F(NodesTest, EveryBitIsThatOfTheSumPerNodeThenOverNodes) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=3 count=40003");
  for (int i = 0; i < 3; ++i) ExpectAll(trainers, "exact_step 2");
}

TEST_F(NodesTest, NodesMayHaveDifferentNumbersOfRanks) {
  const Trainers trainers = Join(3);
  ExpectAll(trainers, "register buckets=2 count=1001");
  ExpectAll(trainers, "step times=5");
}

TEST_F(NodesTest, TheJobsOwnChannelReachesEveryRank) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "barrier");
  ExpectAll(trainers, "allreduce 1000");
  ExpectAll(trainers, "allreduce 77 op=sum dtype=float64");
  ExpectAll(trainers, "broadcast 100000 0");
  ExpectAll(trainers, "broadcast 100000 3");
  // In chunks.
  ExpectAll(trainers, "broadcast 70000000 2");
  ExpectAll(trainers, "barrier");
}

TEST_F(NodesTest, ARankThatLeavesContributesNothing) {
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

TEST_F(NodesTest, AnAbandonedStepIsVoidOnEveryNode) {
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

TEST_F(NodesTest, AMismatchedLayoutNamesBothNodes) {
  const Trainers trainers = Join();
  for (int rank = 0; rank < 4; ++rank) {
    trainers[rank]->Send(rank < 2 ? "register buckets=2" : "register buckets=3");
  }
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_EQ(reply.reason, "LAYOUT_MISMATCH") << reply;
    EXPECT_NE(reply.message.find("node alpha"), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("node beta"), std::string::npos) << reply;
  }
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
}

TEST_F(NodesTest, ATrainersDeathIsKnownOnEveryNodeAndBuildsNoNewEngine) {
  {
    const Trainers trainers = Join();
    ExpectAll(trainers, "register buckets=2 count=100");
    ExpectAll(trainers, "step");
    for (const int rank : {0, 1, 2}) {
      ASSERT_TRUE(trainers[rank]->Do("mark 2 0").ok());
      ASSERT_TRUE(trainers[rank]->Do("mark 2 1").ok());
      trainers[rank]->Begin("wait 2");
    }
    const std::uint64_t killed_ns = trainers[3]->Kill();
    for (const int rank : {0, 1, 2}) {
      const Reply reply = trainers[rank]->Result();
      EXPECT_EQ(reply.code, "ABORTED") << reply;
      EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
      EXPECT_EQ(reply.Field("rank"), "3") << reply;
      EXPECT_EQ(reply.Field("bucket"), "0") << reply;
      EXPECT_LE(reply.end_ns - killed_ns, kLossBoundNs) << reply;
    }
  }
  const Trainers again = Join();
  ExpectAll(again, "register buckets=2 count=100");
  ExpectAll(again, "step times=3");
  EXPECT_EQ(EnginesMade(a_), 1u) << a_.Log();
}

TEST_F(NodesTest, ALostAgentIsNamedByItsNode) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {0, 1}) trainers[rank]->Begin("wait 2");
  const std::uint64_t killed_ns = b_.Kill();
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_EQ(reply.code, "ABORTED") << reply;
    EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
    EXPECT_NE(reply.message.find("the daemon of its node beta"), std::string::npos) << reply;
    EXPECT_LE(reply.end_ns - killed_ns, kNodeLossBoundNs) << reply;
  }
  for (const int rank : {2, 3}) EXPECT_EQ(trainers[rank]->Do("barrier").reason, "DAEMON_LOST");

  // It comes back, and the job with it.
  b_.Start();
  const Trainers next = Join();
  ExpectAll(next, "register buckets=2 count=100");
  ExpectAll(next, "step times=2");
}

TEST_F(NodesTest, ALostCoordinatorIsNamedByItsAddress) {
  const std::string address = coordinator();
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  trainers[2]->Begin("wait 2");
  ASSERT_TRUE(trainers[3]->Do("mark 2 0").ok());
  ASSERT_TRUE(trainers[3]->Do("mark 2 1").ok());
  ASSERT_TRUE(trainers[3]->Do("end 2").ok());
  // Answered by the coordinator, behind all that.
  ASSERT_EQ(trainers[3]->Do("wait 2 timeout_ms=1").reason, "WAIT_TIMEOUT");
  trainers[3]->Begin("wait 2");
  const std::uint64_t killed_ns = a_.Kill();

  const Reply lost = trainers[2]->Result();
  EXPECT_EQ(lost.code, "UNAVAILABLE") << lost;
  EXPECT_EQ(lost.reason, "COORDINATOR_LOST") << lost;
  EXPECT_NE(lost.message.find(address), std::string::npos) << lost;
  EXPECT_LE(lost.end_ns - killed_ns, kNodeLossBoundNs) << lost;
  const Reply doubt = trainers[3]->Result();
  EXPECT_EQ(doubt.code, "ABORTED") << doubt;
  EXPECT_EQ(doubt.reason, "STEP_IN_DOUBT") << doubt;
  EXPECT_NE(doubt.message.find(address), std::string::npos) << doubt;
  EXPECT_LE(doubt.end_ns - killed_ns, kNodeLossBoundNs) << doubt;
}

// Whichever is seen first, the stream's end or the engine's, names the node.
TEST_F(NodesTest, AnAgentsLossInTheMiddleOfExchangesEndsTheJob) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=4 count=300000");
  for (const auto& trainer : trainers) trainer->Begin("step times=100000");
  ASSERT_TRUE(a_.AwaitStatus([](const auto& now) { return now.jobs(0).layouts(0).step() > 5; }));
  const std::uint64_t killed_ns = b_.Kill();
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_TRUE(reply.reason == "RANK_LOST" || reply.reason == "ENGINE_PEER_LOST") << reply;
    EXPECT_NE(reply.message.find("beta"), std::string::npos) << reply;
    EXPECT_LE(reply.end_ns - killed_ns, kNodeLossBoundNs) << reply;
  }
  for (const int rank : {2, 3}) EXPECT_EQ(trainers[rank]->Result().code, "UNAVAILABLE");
}

TEST_F(NodesTest, TheCoordinatorsLossInTheMiddleOfExchangesEndsTheSessions) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=4 count=300000");
  for (const auto& trainer : trainers) trainer->Begin("step times=100000");
  ASSERT_TRUE(a_.AwaitStatus([](const auto& now) { return now.jobs(0).layouts(0).step() > 5; }));
  const std::uint64_t killed_ns = a_.Kill();
  for (const int rank : {2, 3}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_TRUE(reply.reason == "COORDINATOR_LOST" || reply.reason == "STEP_IN_DOUBT") << reply;
    EXPECT_LE(reply.end_ns - killed_ns, kNodeLossBoundNs) << reply;
  }
}

TEST_F(NodesTest, AnotherTokenIsRefused) {
  const auto first = MakeRank(0, 4, "token=right");
  ASSERT_TRUE(first->Join().ok());
  const auto wrong = MakeRank(2, 4, "token=wrong");
  const Reply refused = wrong->Join();
  EXPECT_EQ(refused.code, "PERMISSION_DENIED") << refused;
  EXPECT_NE(refused.message.find("alpha"), std::string::npos) << refused;
  EXPECT_TRUE(MakeRank(3, 4, "token=right")->Join().ok());
  for (const TestDaemon* daemon : {&a_, &b_}) {
    EXPECT_EQ(daemon->Log().find("wrong"), std::string::npos);
    EXPECT_EQ(daemon->Log().find("token=right"), std::string::npos);
  }
}

TEST_F(NodesTest, AnAddressOfTheDaemonItselfIsHere) {
  // Not the text that it listens on, so that it must ask.
  std::string self = coordinator();
  self.replace(0, self.find(':'), "localhost");
  const Trainers trainers = JoinedTrainers(a_, 2, "here", "coordinator=" + self);
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  EXPECT_EQ(EnginesMade(a_), 0u);
}

TEST_F(NodesTest, TheOthersGoOnWhenANodeHasLeftAndStops) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {2, 3}) ASSERT_TRUE(trainers[rank]->Do("leave").ok());
  for (const int rank : {0, 1}) trainers[rank]->Send("step ranks=0,1");
  for (const int rank : {0, 1}) EXPECT_TRUE(trainers[rank]->Receive().ok());
  EXPECT_EQ(b_.Stop(), 0);
  for (const int rank : {0, 1}) trainers[rank]->Send("step ranks=0,1 times=3");
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
  }
}

TEST_F(NodesTest, AStoppedAgentIsLostByItsSilence) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {0, 1}) trainers[rank]->Begin("wait 2");
  b_.process().Signal(SIGSTOP);
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
    EXPECT_NE(reply.message.find("node beta"), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("answered no ping for 5 s"), std::string::npos) << reply;
    EXPECT_LE(reply.end_ns - reply.start_ns, 10 * kNodeLossBoundNs) << reply;
  }
  b_.process().Signal(SIGCONT);
}

TEST_F(NodesTest, GarbageOnThePeerPortEndsThatConnectionOnly) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  const std::string address = coordinator();
  for (const std::string& garbage :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), std::string(100000, '\xff')}) {
    const Descriptor scanner(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port =
        htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.find(':') + 1))));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(scanner.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    (void)send(scanner.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
    // Whatever is said first, the connection ends.
    char answer[4096];
    ssize_t size = 0;
    do {
      ASSERT_TRUE(AwaitReadable(scanner.get(), kPatienceMs));
      size = recv(scanner.get(), answer, sizeof(answer), 0);
    } while (size > 0);
  }
  ExpectAll(trainers, "step times=2");
}

// Whoever speaks the protocol, but not its order, is told so.
TEST_F(NodesTest, AStreamWithoutHelloIsRefused) {
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
  v1::AttachRequest gone;
  gone.mutable_rank_gone()->set_incarnation(7);
  EXPECT_EQ(end({gone}).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
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
  // What may be about a rank that has just gone is ignored; a message of no kind is not.
  v1::AttachRequest open;
  open.mutable_rank_request()->set_incarnation(7);
  open.mutable_rank_request()->mutable_request()->mutable_open_session();
  v1::AttachRequest refuse;
  refuse.mutable_refuse_layout()->set_incarnation(8);
  v1::AttachRequest done;
  done.mutable_launch_done()->set_epoch(9);
  const grpc::Status foreign = end({hello, open, refuse, gone, done, v1::AttachRequest()});
  EXPECT_EQ(foreign.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(foreign.error_message().find("stranger"), std::string::npos);
  EXPECT_NE(foreign.error_message().find("no kind"), std::string::npos);
}

TEST_F(NodesTest, ADrainingAgentEndsItsSessions) {
  const Trainers trainers = Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {0, 1}) trainers[rank]->Begin("wait 2");
  EXPECT_EQ(b_.Stop(), 0);
  for (const int rank : {0, 1}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
  }
}

}  // namespace
}  // namespace gradsync::fault
