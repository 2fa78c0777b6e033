#include "daemon/peer/worker_proxy_server.h"

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "daemon/arena/arena_quota.h"
#include "daemon/base/error.h"
#include "daemon/base/tenant.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"
#include "proto/gradsync/data_type.h"
#include "tests/peer/fake_worker.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kArena = 7;
constexpr std::uint64_t kOtherArena = 8;  // the arena of another worker

class WorkerProxyServerTest : public testing::Test {
 protected:
  WorkerProxyServerTest() {
    WorkerProxyServer::Owner owner;
    owner.send = [this](v1::AttachRequest message) { sent_.push_back(std::move(message)); };
    owner.find = [this](std::uint64_t arena, std::uint32_t bucket,
                        std::uint64_t step) -> absl::StatusOr<ProxiedBucket> {
      if (arena > kOtherArena || bucket >= 2) return absl::FailedPreconditionError("no bucket");
      return ProxiedBucket{arena == kArena ? worker_.get() : nullptr,
                           DataType::kBfloat16,
                           1000,
                           512 + bucket,
                           4096 + step,
                           2,
                           semaphores_};
    };
    owner.settled = [] {};
    owner.account = {&memory_, Tenant(1000)};
    server_ = std::make_shared<WorkerProxyServer>(std::move(owner));
    number_ = server_->NumberOf(worker_);
  }

  // Answers the calls that are left, since a worker answers every call.
  ~WorkerProxyServerTest() override {
    if (worker_ != nullptr) worker_->answers.clear();
  }

  v1::WorkerCall Message(const worker::Call& call) {
    v1::WorkerCall message;
    message.set_worker(number_);
    message.set_id(++last_id_);
    message.set_call(call.SerializeAsString());
    return message;
  }
  static worker::Call Launch() {
    worker::Call call;
    worker::Launch* const launch = call.mutable_launch();
    launch->set_layout(3);
    launch->set_step(5);
    launch->set_bucket(1);
    launch->set_data_type(static_cast<std::uint32_t>(DataType::kBfloat16));
    launch->set_staging_data_type(static_cast<std::uint32_t>(DataType::kFloat32));
    launch->set_count(1000);
    launch->set_scale(0.25);
    launch->set_step_buckets(2);
    launch->add_arenas(kArena);
    return call;
  }
  static worker::Call Connect() {
    worker::Call call;
    call.mutable_connect()->set_unique_id(std::string(128, 'x'));
    call.mutable_connect()->set_rank(2);
    call.mutable_connect()->set_ranks(4);
    call.mutable_connect()->set_limit_ns(1'000'000'000);
    return call;
  }
  // The latest reply.
  const v1::WorkerReply& LastReply() { return sent_.back().worker_reply(); }

  // Expects that the call is answered with an error, and never reaches the worker.
  void ExpectRefused(const worker::Call& call) {
    ExpectRefused(Message(call), call.ShortDebugString());
  }
  void ExpectRefused(const v1::WorkerCall& message, const std::string& what) {
    const std::size_t calls = worker_->calls.size();
    server_->Call(message);
    EXPECT_EQ(worker_->calls.size(), calls) << what;
    ASSERT_FALSE(sent_.empty());
    EXPECT_EQ(LastReply().id(), message.id());
    EXPECT_NE(LastReply().status().code(), 0) << what;
    EXPECT_FALSE(server_->busy());
  }

  ArenaQuota memory_{1 << 20, "quota_control_bytes_per_user", "the daemon's own memory"};
  std::shared_ptr<FakeWorker> worker_ = std::make_shared<FakeWorker>();
  std::shared_ptr<SemaphorePage> semaphores_ = *SemaphorePage::Create(2);
  std::vector<v1::AttachRequest> sent_;
  std::shared_ptr<WorkerProxyServer> server_;
  std::uint64_t number_ = 0;
  std::uint64_t last_id_ = 0;
};

TEST_F(WorkerProxyServerTest, LaunchGetsItsOffsetsFromThisNodesPlan) {
  worker::Call call = Launch();
  call.mutable_launch()->set_offset(99);  // the coordinator does not know this node's offsets
  server_->Call(Message(call));
  ASSERT_EQ(worker_->calls.size(), 1u);
  const worker::Launch& launch = worker_->calls[0].launch();
  EXPECT_EQ(launch.layout(), 3u);
  EXPECT_EQ(launch.step(), 5u);
  EXPECT_EQ(launch.bucket(), 1u);
  EXPECT_EQ(launch.data_type(), static_cast<std::uint32_t>(DataType::kBfloat16));
  EXPECT_EQ(launch.staging_data_type(), static_cast<std::uint32_t>(DataType::kFloat32));
  EXPECT_EQ(launch.offset(), 513u);
  EXPECT_EQ(launch.verdict_offset(), 4101u);
  EXPECT_EQ(launch.count(), 1000u);
  EXPECT_EQ(launch.scale(), 0.25);
  EXPECT_EQ(launch.step_buckets(), 2u);
  EXPECT_TRUE(launch.measure());
  ASSERT_EQ(launch.arenas_size(), 1);
  EXPECT_EQ(launch.arenas(0), kArena);

  EXPECT_TRUE(server_->busy());
  EXPECT_TRUE(sent_.empty());
  WorkerPort::Reply reply;
  reply.message.mutable_launch_done()->set_void_step(true);
  reply.message.mutable_launch_done()->set_sum_of_squares(2.5);
  worker_->Answer(std::move(reply));
  EXPECT_EQ(LastReply().id(), last_id_);
  EXPECT_EQ(LastReply().status().code(), 0);
  worker::Reply sent;
  ASSERT_TRUE(sent.ParseFromString(LastReply().reply()));
  EXPECT_TRUE(sent.launch_done().void_step());
  EXPECT_EQ(sent.launch_done().sum_of_squares(), 2.5);
  EXPECT_FALSE(server_->busy());
}

TEST_F(WorkerProxyServerTest, MalformedCallsAreRefusedAndAnswered) {
  const auto launch = [this](const std::function<void(worker::Launch*)>& spoil) {
    worker::Call call = Launch();
    spoil(call.mutable_launch());
    ExpectRefused(call);
  };
  const auto type = [](DataType dtype) { return static_cast<std::uint32_t>(dtype); };
  launch([](auto* l) { l->set_data_type(0); });
  launch([](auto* l) { l->set_data_type(99); });
  launch([](auto* l) { l->set_data_type(l->data_type() + 256); });
  launch([](auto* l) { l->set_staging_data_type(l->staging_data_type() + 256); });
  launch([](auto* l) { l->set_count(std::numeric_limits<std::uint64_t>::max()); });
  launch([](auto* l) { l->set_count(999); });
  launch([&](auto* l) { l->set_staging_data_type(type(DataType::kFloat64)); });
  launch([&](auto* l) { l->set_staging_data_type(type(DataType::kFloat16)); });
  launch([&](auto* l) { l->set_data_type(type(DataType::kFloat16)); });
  launch([](auto* l) { l->set_bucket(2); });
  launch([](auto* l) { l->set_step_buckets(0); });
  launch([](auto* l) { l->set_step_buckets(3); });
  launch([](auto* l) { l->set_void_contributions(1); });
  launch([](auto* l) { l->add_arenas(kArena); });
  launch([](auto* l) { l->add_arenas(kOtherArena); });
  launch([](auto* l) { l->set_arenas(0, 1000); });

  const auto connect = [this](const std::function<void(worker::Connect*)>& spoil) {
    worker::Call call = Connect();
    spoil(call.mutable_connect());
    ExpectRefused(call);
  };
  connect([](auto* c) { c->set_rank(4); });
  connect([](auto* c) { c->set_ranks(std::numeric_limits<std::uint32_t>::max()); });
  connect([](auto* c) { c->set_max_ctas(1'000'000); });
  connect([](auto* c) { c->set_algorithm("Ring;NVLS"); });
  connect([](auto* c) { c->set_protocol(std::string(100, 'x')); });
  connect([](auto* c) { c->clear_unique_id(); });
  connect([](auto* c) { c->set_unique_id(std::string(5000, 'x')); });
  connect([](auto* c) { c->set_limit_ns(std::numeric_limits<std::uint64_t>::max()); });

  for (const std::uint64_t arena : {kOtherArena, std::uint64_t{1000}}) {
    worker::Call await;
    await.mutable_await_ready()->add_arenas(arena);
    ExpectRefused(await);
  }

  worker::Call twice;
  for (int i = 0; i < 2; ++i) twice.mutable_await_ready()->add_arenas(kArena);
  ExpectRefused(twice);

  ExpectRefused(worker::Call());  // a call of an unknown kind
  // Calls that a worker takes only from its own node.
  worker::Call own;
  own.mutable_stop();
  ExpectRefused(own);
  own.mutable_add_arena()->set_arena(kArena);
  ExpectRefused(own);
  own.mutable_remove_arena()->set_arena(kArena);
  ExpectRefused(own);
  own.mutable_start();
  ExpectRefused(own);

  v1::WorkerCall message = Message(Launch());
  message.set_call("\xff no call");
  ExpectRefused(message, "no call");
  worker::Call padded = Launch();
  padded.mutable_launch()->mutable_arenas()->Resize(70'000, kArena);
  message = Message(padded);
  ExpectRefused(message, "a long call");
  EXPECT_NE(LastReply().status().message().find("no call"), std::string::npos);
  message = Message(Launch());
  message.set_worker(99);
  ExpectRefused(message, "worker 99");
  EXPECT_TRUE(LastReply().ended());
}

// A worker that waits for a GPU answers late, and a coordinator may call without end.
TEST_F(WorkerProxyServerTest, ManyOpenCallsAreTheUsersMemory) {
  for (int i = 0; i < 100; ++i) server_->Call(Message(Launch()));
  EXPECT_EQ(memory_.total_bytes(), 0u) << "those of a step cost nothing";
  while (sent_.empty() && worker_->calls.size() < 10'000) server_->Call(Message(Launch()));
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(LastReply().status().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_NE(LastReply().status().message().find("quota_control_bytes_per_user"), std::string::npos);
  EXPECT_FALSE(LastReply().ended());
  EXPECT_GT(worker_->calls.size(), 300u);
  EXPECT_GT(memory_.total_bytes(), std::uint64_t{1} << 19);
  while (worker_->unanswered() > 0) worker_->Answer(WorkerPort::Reply{});
  EXPECT_FALSE(server_->busy());
  EXPECT_EQ(memory_.total_bytes(), 0u);
  server_->Call(Message(Launch()));
  EXPECT_TRUE(server_->busy()) << "there is room again";
}

TEST_F(WorkerProxyServerTest, AwaitReadyIsPassedOn) {
  worker::Call call;
  call.mutable_await_ready()->set_layout(3);
  call.mutable_await_ready()->set_step(5);
  call.mutable_await_ready()->set_bucket(1);
  call.mutable_await_ready()->add_arenas(kArena);
  server_->Call(Message(call));
  const worker::AwaitReady& await = worker_->calls.at(0).await_ready();
  EXPECT_EQ(await.layout(), 3u);
  EXPECT_EQ(await.step(), 5u);
  EXPECT_EQ(await.bucket(), 1u);
  EXPECT_EQ(await.arenas(0), kArena);
  worker_->Answer(WorkerPort::Reply{});
  EXPECT_EQ(LastReply().id(), last_id_);
  EXPECT_EQ(LastReply().status().code(), 0);
}

TEST_F(WorkerProxyServerTest, ConnectedWorkerIsKeptUntilReleased) {
  const std::weak_ptr<FakeWorker> worker = worker_;
  server_->Call(Message(Connect()));
  worker_->Answer(WorkerPort::Reply{});
  worker_.reset();
  ASSERT_FALSE(worker.expired())
      << "the job's other workers need it, though no rank of this node does";
  EXPECT_EQ(worker.lock()->calls.back().connect().rank(), 2u);

  v1::WorkerRelease release;
  release.set_worker(number_);
  server_->Release(release);
  ASSERT_FALSE(worker.expired()) << "it has to disconnect first";
  EXPECT_TRUE(worker.lock()->calls.back().has_disconnect());
  worker.lock()->Answer(WorkerPort::Reply{});
  worker.lock()->answers.clear();
  EXPECT_TRUE(worker.expired());
  server_->Tick();
  EXPECT_EQ(sent_.back().worker_ended().worker(), number_);
}

TEST_F(WorkerProxyServerTest, EndedWorkerIsReportedOnce) {
  server_->Tick();
  EXPECT_TRUE(sent_.empty());
  worker_->Kill(absl::UnavailableError("killed"));
  server_->Tick();
  server_->Tick();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].worker_ended().worker(), number_);
  EXPECT_NE(sent_[0].worker_ended().status().code(), 0);
  EXPECT_NE(server_->NumberOf(std::make_shared<FakeWorker>()), number_);
}

TEST_F(WorkerProxyServerTest, ReleaseWithAnErrorKillsTheWorker) {
  server_->Call(Message(Launch()));
  v1::WorkerRelease release;
  release.set_worker(number_);
  *release.mutable_status() = ToProto(absl::UnavailableError("another node's worker is lost"));
  server_->Release(release);
  EXPECT_EQ(worker_->killed.message(), "another node's worker is lost");
  EXPECT_NE(LastReply().status().code(), 0) << "the open call gets an error";
  EXPECT_TRUE(LastReply().ended());
}

TEST_F(WorkerProxyServerTest, LossOfTheCoordinatorKillsBusyWorkersOnly) {
  const auto idle = std::make_shared<FakeWorker>();
  v1::WorkerCall connect = Message(Connect());
  connect.set_worker(server_->NumberOf(idle));
  server_->Call(connect);
  idle->Answer(WorkerPort::Reply{});
  server_->Call(Message(Launch()));
  server_->End(absl::UnavailableError("lost"));
  EXPECT_TRUE(worker_->HasEnded());
  EXPECT_FALSE(idle->HasEnded());
  EXPECT_TRUE(idle->calls.back().has_disconnect());
  EXPECT_FALSE(server_->busy()) << "no worker accesses the ranks' memory";
  idle->answers.clear();  // the answers hold the worker
}

}  // namespace
}  // namespace gradsync::daemon
