#include "daemon/peer/remote_worker.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/error.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kIdleNs = 1000;

class FakeLink final : public NodeLink {
 public:
  void Queue(v1::AttachResponse message) override {
    sent.push_back(std::move(message));
    if (queued) queued();
  }
  void Flush() override {}
  void Close(const absl::Status&) override { ADD_FAILURE(); }
  const std::string& node_name() const override { return name_; }
  const std::string& address() const override { return name_; }
  const std::string& network() const override { return name_; }
  const EngineLimits& engine_limits() const override { return limits_; }
  std::uint64_t heard_ns() const override { return 0; }

  std::vector<v1::AttachResponse> sent;
  std::function<void()> queued;

 private:
  const std::string name_ = "beta";
  const EngineLimits limits_{};
};

class RemoteWorkerTest : public testing::Test {
 protected:
  std::shared_ptr<RemoteWorker> Worker(std::uint64_t number = 4,
                                       const std::string& device = "GPU-a") {
    auto worker = workers_.Find(link_, number, device);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }
  // Makes the call, and keeps the answer.
  void Call(RemoteWorker* worker, const worker::Call& call) {
    worker->Call(call, {}, [this](absl::StatusOr<WorkerPort::Reply> answer) {
      answers_.push_back(std::move(answer));
    });
  }
  static worker::Call Launch() {
    worker::Call call;
    call.mutable_launch()->set_layout(9);
    call.mutable_launch()->set_count(100);
    call.mutable_launch()->add_arenas(17);
    return call;
  }
  static worker::Call NewId() {
    worker::Call call;
    call.mutable_new_nccl_id();
    return call;
  }
  static v1::WorkerReply ReplyTo(const v1::AttachResponse& call, const worker::Reply& reply = {}) {
    v1::WorkerReply message;
    message.set_worker(call.worker_call().worker());
    message.set_id(call.worker_call().id());
    message.set_reply(reply.SerializeAsString());
    return message;
  }
  static worker::Reply NcclId(const std::string& id) {
    worker::Reply reply;
    reply.mutable_nccl_id()->set_unique_id(id);
    return reply;
  }
  static worker::Reply LaunchDone() {
    worker::Reply reply;
    reply.mutable_launch_done()->set_void_step(true);
    reply.mutable_launch_done()->set_ready_ns(123);  // by the clock of the worker's node
    reply.mutable_launch_done()->set_finish_ns(456);
    return reply;
  }

  std::shared_ptr<FakeLink> link_ = std::make_shared<FakeLink>();
  ManualClock clock_;
  RemoteWorkers workers_{&clock_, kIdleNs};
  std::vector<absl::StatusOr<WorkerPort::Reply>> answers_;
};

TEST_F(RemoteWorkerTest, CallsTravelToTheNodeAndBack) {
  const auto worker = Worker();
  Call(worker.get(), NewId());
  Call(worker.get(), Launch());
  ASSERT_EQ(link_->sent.size(), 2u);
  EXPECT_EQ(link_->sent[1].worker_call().worker(), 4u);
  worker::Call sent;
  ASSERT_TRUE(sent.ParseFromString(link_->sent[1].worker_call().call()));
  EXPECT_EQ(sent.launch().layout(), 9u);
  EXPECT_EQ(sent.launch().arenas(0), 17u);
  EXPECT_TRUE(answers_.empty());

  ASSERT_TRUE(workers_.Take(ReplyTo(link_->sent[1], LaunchDone())).ok());
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0]->message.launch_done().void_step());
  EXPECT_EQ(answers_[0]->message.launch_done().ready_ns(), 0u);
  EXPECT_EQ(answers_[0]->message.launch_done().finish_ns(), clock_.NowNs())
      << "by this node's clock";

  ASSERT_TRUE(workers_.Take(ReplyTo(link_->sent[0], NcclId("an id"))).ok());
  EXPECT_EQ(answers_[1]->message.nccl_id().unique_id(), "an id");
}

TEST_F(RemoteWorkerTest, FailureNamesTheNode) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  v1::WorkerReply reply = ReplyTo(link_->sent[0]);
  *reply.mutable_status() =
      ToProto(MakeError(absl::StatusCode::kUnavailable, reason::kWorkerLost, "it was killed"));
  reply.set_ended(true);
  ASSERT_TRUE(workers_.Take(reply).ok());
  const absl::Status why = answers_[0].status();
  EXPECT_EQ(why.message(), "on node beta: it was killed");
  EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
  EXPECT_TRUE(worker->HasEnded());
  Call(worker.get(), Launch());
  EXPECT_FALSE(answers_[1].ok()) << "it is answered at once";
  EXPECT_EQ(link_->sent.size(), 1u);
}

TEST_F(RemoteWorkerTest, WorkerThatEndsAfterAnAnswerIsLost) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  v1::WorkerReply reply = ReplyTo(link_->sent[0], LaunchDone());
  reply.set_ended(true);
  ASSERT_TRUE(workers_.Take(reply).ok());
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
  const absl::Status why = worker->EndReason();
  EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
  EXPECT_EQ(DetailsOf(why).Value(field::kNode), "beta");
}

TEST_F(RemoteWorkerTest, WrongReplyIsMalformed) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  Call(worker.get(), NewId());
  const v1::AttachResponse& launch = link_->sent[0];
  const auto expect_malformed = [this](const v1::WorkerReply& reply) {
    EXPECT_EQ(DetailsOf(workers_.Take(reply)).reason, "MALFORMED") << reply.ShortDebugString();
  };
  expect_malformed(ReplyTo(launch));  // it has no result
  expect_malformed(ReplyTo(launch, NcclId("an id")));
  v1::WorkerReply done = ReplyTo(launch, LaunchDone());
  v1::WorkerReply unasked = done;
  unasked.set_id(done.id() + 100);
  expect_malformed(unasked);
  v1::WorkerReply garbage = done;
  garbage.set_reply("\xff no reply");
  expect_malformed(garbage);
  expect_malformed(ReplyTo(link_->sent[1], NcclId(std::string(5000, 'x'))));
  expect_malformed(ReplyTo(link_->sent[1], NcclId("")));
  EXPECT_TRUE(answers_.empty());

  ASSERT_TRUE(workers_.Take(done).ok());
  expect_malformed(done);  // the same reply once more
  done.set_worker(5);
  EXPECT_TRUE(workers_.Take(done).ok()) << "the worker may have been released meanwhile";
}

TEST_F(RemoteWorkerTest, LossAnswersEveryOpenCall) {
  const auto worker = Worker();
  const auto other = Worker(5, "GPU-b");
  Call(worker.get(), Launch());
  Call(other.get(), Launch());
  workers_.Ended(4, absl::UnavailableError("ended"));
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(worker->HasEnded());
  EXPECT_FALSE(other->HasEnded());
  workers_.Lost(absl::UnavailableError("the node was lost"));
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(other->HasEnded());
}

TEST_F(RemoteWorkerTest, CallsOfAKilledWorkerAreAnsweredWhenItHasEnded) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  worker->Kill(absl::UnavailableError("the communicator is broken"));
  EXPECT_TRUE(worker->HasEnded());
  EXPECT_TRUE(answers_.empty()) << "the worker may still access its ranks' memory";
  EXPECT_NE(link_->sent[1].worker_release().status().code(), 0);
  v1::WorkerReply reply = ReplyTo(link_->sent[0]);
  *reply.mutable_status() = ToProto(absl::UnavailableError("killed"));
  ASSERT_TRUE(workers_.Take(reply).ok());
  EXPECT_EQ(answers_.size(), 1u);
}

// Its node answers pings, so nobody else would end the wait.
TEST_F(RemoteWorkerTest, AKilledWorkerThatDoesNotEndIsLateAfterTwoMinutes) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  clock_.Advance(1'000'000'000'000);
  EXPECT_TRUE(workers_.Tick(clock_.NowNs())) << "it works";
  worker->Kill(absl::UnavailableError("the communicator is broken"));
  clock_.Advance(120'000'000'000);
  EXPECT_TRUE(workers_.Tick(clock_.NowNs()));
  clock_.Advance(1);
  EXPECT_FALSE(workers_.Tick(clock_.NowNs()));
  workers_.Lost(absl::UnavailableError("the node was disconnected"));
  EXPECT_TRUE(workers_.Tick(clock_.NowNs()));
}

TEST_F(RemoteWorkerTest, NewWorkerOnAGpuReplacesTheOld) {
  const auto worker = Worker(4, "GPU-a");
  EXPECT_EQ(Worker(4, "GPU-a"), worker);
  EXPECT_NE(Worker(5, "GPU-a"), worker);
  EXPECT_TRUE(worker->HasEnded());
}

TEST_F(RemoteWorkerTest, WorkersPerNodeAreLimited) {
  EXPECT_FALSE(workers_.Find(link_, 1, std::string(1000, 'x')).ok());
  std::uint64_t number = 1;
  while (number < 10'000 && workers_.Find(link_, number, std::to_string(number)).ok()) ++number;
  EXPECT_LT(number, 1000u);
}

TEST_F(RemoteWorkerTest, UnusedWorkerIsReleasedAfterTheIdleLimit) {
  auto worker = Worker();
  clock_.Advance(10 * kIdleNs);
  workers_.Tick(clock_.NowNs());
  worker.reset();
  workers_.Tick(clock_.NowNs());
  EXPECT_TRUE(link_->sent.empty()) << "new trainers may still use it";
  clock_.Advance(kIdleNs + 1);
  workers_.Tick(clock_.NowNs());
  ASSERT_EQ(link_->sent.size(), 1u);
  EXPECT_EQ(link_->sent[0].worker_release().worker(), 4u);
  EXPECT_EQ(link_->sent[0].worker_release().status().code(), 0);
}

// A launch may find a worker at the moment at which it is released. Nobody would take the reply, so
// the launch would never end.
TEST_F(RemoteWorkerTest, AReleasedWorkerAnswersCallsAtOnce) {
  auto worker = Worker();
  const std::weak_ptr<RemoteWorker> weak = worker;
  worker.reset();
  workers_.Tick(clock_.NowNs());
  clock_.Advance(kIdleNs + 1);
  std::shared_ptr<RemoteWorker> found;
  link_->queued = [&] { found = weak.lock(); };
  workers_.Tick(clock_.NowNs());
  link_->queued = nullptr;
  ASSERT_EQ(link_->sent.size(), 1u);
  EXPECT_TRUE(link_->sent[0].has_worker_release());
  ASSERT_NE(found, nullptr);
  Call(found.get(), Launch());
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(DetailsOf(answers_[0].status()).reason, "WORKER_LOST");
  EXPECT_TRUE(found->HasEnded());

  const auto successor = Worker();
  found.reset();
  Call(successor.get(), Launch());
  ASSERT_EQ(link_->sent.size(), 2u) << "the successor is not released";
  EXPECT_TRUE(link_->sent[1].has_worker_call());
}

TEST_F(RemoteWorkerTest, CallsOnlyForTheWorkersOwnNodeAreNotSent) {
  const auto worker = Worker();
  worker::Call call;
  call.mutable_remove_arena()->set_arena(17);
  Call(worker.get(), call);
  EXPECT_TRUE(answers_[0].ok());
  call.mutable_ping();
  Call(worker.get(), call);
  EXPECT_FALSE(answers_[1].ok()) << "a worker takes pings only from its own node";
  EXPECT_TRUE(link_->sent.empty());
}

}  // namespace
}  // namespace gradsync::daemon
