// The links of several users to one coordinator, which the test plays. gRPC carries them.

#include "daemon/peer/coordinator_link_table.h"

#include <grpcpp/grpcpp.h>
#include <poll.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/executor.h"
#include "daemon/base/fair_executor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/job/job_port.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/peer/peer_turns.h"
#include "daemon/rpc/completion_dispatcher.h"
#include "gradsync/v1/peer.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/attack/raw_http2.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

using Users = std::vector<uid_t>;

constexpr uid_t kUser = 1000;
constexpr uid_t kOther = 1001;

// Answers each Hello with the instance of the daemon that dials: as if it were that daemon.
class MirrorCoordinator final : public v1::Peer::Service {
 public:
  MirrorCoordinator() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~MirrorCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  // For whom it was dialed, in order.
  Users dialed() {
    MutexLock lock(&mutex_);
    return dialed_;
  }

 private:
  using Stream = grpc::ServerReaderWriter<v1::AttachResponse, v1::AttachRequest>;

  grpc::Status Attach(grpc::ServerContext* /*context*/, Stream* stream) override {
    for (v1::AttachRequest message; stream->Read(&message);) {
      if (!message.has_hello()) continue;
      {
        MutexLock lock(&mutex_);
        dialed_.push_back(message.hello().uid());
      }
      v1::AttachResponse welcome;
      welcome.mutable_welcome()->set_instance(message.hello().instance());
      welcome.mutable_welcome()->set_node_name("mirror");
      stream->Write(welcome);
    }
    return grpc::Status::OK;
  }

  int port_ = 0;
  Mutex mutex_;
  Users dialed_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Server> server_;  // last
};

// This daemon's jobs: none.
class NoJobs final : public JobFinder {
 public:
  void Join(const JoinRequest& /*request*/, std::shared_ptr<SessionSink> /*sink*/,
            std::function<void(absl::StatusOr<Joined>)> joined) override {
    joined(absl::NotFoundError("here"));
  }
};

class CoordinatorLinkTableTest : public testing::Test {
 protected:
  void TearDown() override {
    table_.Cancel();
    EXPECT_TRUE(table_.streams().WaitForNone(std::chrono::steady_clock::now() +
                                             std::chrono::milliseconds(kPatienceMs)));
    queue_.Shutdown();
    reads_.join();
    executor_.reset();
  }

  CoordinatorLinkTable::Options Options() {
    CoordinatorLinkTable::Options options;
    options.link.instance = std::string(kInstanceBytes, 'b');
    options.link.node_name = "beta";
    options.link.turns = &turns_;
    options.link.executor = executor_.get();
    options.link.reaper = &reaper_;
    options.link.clock = &clock_;
    options.link.tls = true;  // otherwise the kernel is asked who answers
    options.link.here = &here_;
    options.quota_jobs_per_user = 4;
    options.credentials = grpc::InsecureChannelCredentials();
    options.queue = &queue_;
    options.dialed = [] {};
    return options;
  }

  // A rank of the user joins a job there. It ends up at this daemon, which has no such job.
  void JoinOf(const Tenant& user) {
    EXPECT_EQ(Answer(Join(user, coordinator_.address())), absl::NotFoundError("here"));
    table_.DropEnded();
  }

  std::future<absl::Status> Join(const Tenant& user, const std::string& coordinator) {
    JoinRequest request;
    request.key = JobKey{user.uid, "job", ""};
    request.pod = user.pod;
    request.world_size = 2;
    request.coordinator = coordinator;
    request.patience_ns = std::uint64_t{kPatienceMs} * 1'000'000;
    const auto answer = std::make_shared<std::promise<absl::Status>>();
    table_.Join(request, std::make_shared<RecordingSink>(),
                [answer](const auto& joined) { answer->set_value(joined.status()); });
    return answer->get_future();
  }
  static absl::Status Answer(std::future<absl::Status> answer) {
    const auto state = answer.wait_for(std::chrono::milliseconds(kPatienceMs));
    return state == std::future_status::ready ? answer.get() : absl::UnknownError("no answer");
  }

  MirrorCoordinator coordinator_;
  ManualClock clock_;
  NoJobs here_;
  std::unique_ptr<FairExecutor> executor_ = std::make_unique<FairExecutor>(1);
  PeerTurns turns_{&clock_, executor_.get()};
  ConcurrentExecutor reaper_{1};
  grpc::CompletionQueue queue_;
  CoordinatorLinkTable table_{Options()};
  std::thread reads_{[this] {
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) static_cast<Completion*>(tag)->Run(ok);
  }};
};

TEST_F(CoordinatorLinkTableTest, ACoordinatorThatIsThisDaemonIsDialedOnce) {
  JoinOf(Tenant(kUser));
  JoinOf(Tenant(kUser));
  EXPECT_EQ(coordinator_.dialed(), Users({kUser}));
}

// It may have lied to the first one.
TEST_F(CoordinatorLinkTableTest, NoUserReliesOnAnotherUsersCoordinator) {
  JoinOf(Tenant(kUser));
  JoinOf(Tenant(kOther));
  EXPECT_EQ(coordinator_.dialed(), Users({kUser, kOther}));
  const Tenant pod(kUser, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60"));
  JoinOf(pod);
  EXPECT_EQ(coordinator_.dialed(), Users({kUser, kOther, kUser}));
}

// With TLS to a distant node, or on a busy machine, the first frame comes late.
TEST_F(CoordinatorLinkTableTest, ASlowCoordinatorIsNotDialedAgain) {
  std::string address;
  const Descriptor listener = ListenTcp("127.0.0.1", &address);
  std::future<absl::Status> joined = Join(Tenant(kUser), address);
  const Descriptor first = AcceptOne(listener, kPatienceMs);
  ASSERT_GE(first.get(), 0);
  pollfd next{listener.get(), POLLIN, 0};
  EXPECT_EQ(poll(&next, 1, /*timeout=*/500), 0) << "gRPC began anew";
  table_.EndRanks(absl::CancelledError("the test ends"));
  EXPECT_TRUE(absl::IsCancelled(Answer(std::move(joined))));
}

// It may start again while a rank joins, or end connections because it is busy.
TEST_F(CoordinatorLinkTableTest, ACoordinatorThatIsLostBeforeItAnswersIsDialedAgain) {
  std::string address;
  const Descriptor listener = ListenTcp("127.0.0.1", &address);
  std::future<absl::Status> joined = Join(Tenant(kUser), address);
  for (int dial = 0; dial < 4; ++dial) {
    Descriptor accepted = AcceptOne(listener, kPatienceMs);
    ASSERT_GE(accepted.get(), 0) << dial;
    attack::RawHttp2 coordinator = attack::RawHttp2::Server(std::move(accepted));
    ASSERT_TRUE(coordinator.AwaitCall()) << dial;
  }
  const absl::Status why = Answer(std::move(joined));
  EXPECT_TRUE(absl::IsUnavailable(why)) << why;
  EXPECT_NE(why.message().find("cannot reach the daemon"), std::string::npos) << why;

  joined = Join(Tenant(kUser), address);
  const Descriptor first = AcceptOne(listener, kPatienceMs);
  table_.Cancel();
  EXPECT_FALSE(Answer(std::move(joined)).ok());
  EXPECT_TRUE(absl::IsUnavailable(Answer(Join(Tenant(kUser), address)))) << "the daemon stops";
}

TEST_F(CoordinatorLinkTableTest, NoRankJoinsOnceTheDaemonDrains) {
  std::string address;
  const Descriptor listener = ListenTcp("127.0.0.1", &address);
  std::future<absl::Status> joined = Join(Tenant(kUser), address);
  const absl::Status why = absl::AbortedError("it drains");
  EXPECT_TRUE(table_.EndIdle(why)) << "no rank is left";
  EXPECT_EQ(Answer(std::move(joined)), why);
  EXPECT_EQ(Answer(Join(Tenant(kUser), address)), why);
  EXPECT_EQ(Answer(Join(Tenant(kOther), coordinator_.address())), why);
}

TEST_F(CoordinatorLinkTableTest, AUserWhoseCoordinatorDoesHarmWaits) {
  const Tenant user(kUser);
  std::string address;
  const Descriptor listener = ListenTcp("127.0.0.1", &address);
  std::future<absl::Status> refused = Join(user, address);
  auto coordinator = attack::RawHttp2::Server(AcceptOne(listener, kPatienceMs));
  ASSERT_TRUE(Soon([&] {
    table_.Tick(clock_.NowNs());
    return !coordinator.SendBulk();
  }));
  const absl::Status why = Answer(std::move(refused));
  EXPECT_TRUE(absl::IsPermissionDenied(why)) << why;
  for (int look = 0; look < 2; ++look) {
    const absl::Status paused = Answer(Join(user, address));
    EXPECT_TRUE(absl::IsResourceExhausted(paused)) << paused;
    EXPECT_NE(paused.message().find("a coordinator of user 1000 did harm"), std::string::npos)
        << paused;
    table_.DropEnded();  // the pause outlives the link
  }
  JoinOf(Tenant(kOther));

  clock_.Advance(GrowingPause::kFirstNs);
  std::future<absl::Status> again = Join(user, address);
  EXPECT_GE(AcceptOne(listener, kPatienceMs).get(), 0) << "it is dialed anew";
  table_.EndRanks(absl::CancelledError("the test ends"));
  EXPECT_FALSE(again.get().ok());
}

}  // namespace
}  // namespace gradsync::daemon
