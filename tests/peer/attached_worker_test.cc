#include "daemon/peer/attached_worker.h"

#include <memory>
#include <string>
#include <vector>

#include "daemon/base/error.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"
#include "tests/job/manual_clock.h"

namespace gradsync {
namespace {

constexpr std::uint64_t kIdleNs = 1000;

class FakeLink final : public NodeLink {
 public:
  void Queue(v1::AttachResponse message) override { said.push_back(std::move(message)); }
  void Flush() override {}
  void Close(const absl::Status&) override { ADD_FAILURE(); }
  const std::string& node_name() const override { return name_; }
  const std::string& address() const override { return name_; }
  std::uint64_t heard_ns() const override { return 0; }

  std::vector<v1::AttachResponse> said;

 private:
  const std::string name_ = "beta";
};

class AttachedWorkerTest : public testing::Test {
 protected:
  std::shared_ptr<AttachedWorker> Worker(std::uint64_t number = 4,
                                         const std::string& device = "GPU-a") {
    auto worker = workers_.Find(link_, number, device);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }
  // Calls, and keeps the answer.
  void Call(AttachedWorker* worker, const worker::Call& call) {
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
  v1::WorkerReply ReplyTo(const v1::AttachResponse& call) {
    v1::WorkerReply reply;
    reply.set_worker(call.worker_call().worker());
    reply.set_id(call.worker_call().id());
    return reply;
  }

  std::shared_ptr<FakeLink> link_ = std::make_shared<FakeLink>();
  ManualClock clock_;
  AttachedWorkers workers_{&clock_, kIdleNs};
  std::vector<absl::StatusOr<WorkerPort::Reply>> answers_;
};

TEST_F(AttachedWorkerTest, CallsGoToItsNodeAndComeBack) {
  const auto worker = Worker();
  Call(worker.get(), NewId());
  Call(worker.get(), Launch());
  ASSERT_EQ(link_->said.size(), 2u);
  EXPECT_EQ(link_->said[1].worker_call().worker(), 4u);
  EXPECT_EQ(link_->said[1].worker_call().launch().layout(), 9u);
  EXPECT_EQ(link_->said[1].worker_call().launch().arenas(0), 17u);
  EXPECT_TRUE(answers_.empty());

  v1::WorkerReply done = ReplyTo(link_->said[1]);
  done.mutable_launched()->set_void_step(true);
  ASSERT_TRUE(workers_.Take(done).ok());
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0]->message.launch_done().void_step());
  EXPECT_EQ(answers_[0]->message.launch_done().finish_ns(), clock_.NowNs())
      << "of this node's clock";

  v1::WorkerReply id = ReplyTo(link_->said[0]);
  id.set_nccl_id("an id");
  ASSERT_TRUE(workers_.Take(id).ok());
  EXPECT_EQ(answers_[1]->message.nccl_id().unique_id(), "an id");
}

TEST_F(AttachedWorkerTest, AFailureNamesTheNode) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  v1::WorkerReply reply = ReplyTo(link_->said[0]);
  *reply.mutable_status() =
      ToProto(MakeError(absl::StatusCode::kUnavailable, "WORKER_LOST", "it was killed"));
  reply.set_over(true);
  ASSERT_TRUE(workers_.Take(reply).ok());
  const absl::Status why = answers_[0].status();
  EXPECT_EQ(why.message(), "on node beta: it was killed");
  EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
  EXPECT_TRUE(worker->over());
  Call(worker.get(), Launch());
  EXPECT_FALSE(answers_[1].ok()) << "at once";
  EXPECT_EQ(link_->said.size(), 1u);
}

TEST_F(AttachedWorkerTest, AReplyThatCannotBeRightIsMalformed) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  Call(worker.get(), NewId());
  const v1::WorkerReply right = ReplyTo(link_->said[0]);
  const auto expect_malformed = [this](const v1::WorkerReply& reply) {
    EXPECT_EQ(DetailsOf(workers_.Take(reply)).reason, "MALFORMED") << reply.ShortDebugString();
  };
  expect_malformed(right);  // without a result
  v1::WorkerReply other = right;
  other.set_nccl_id("an id");
  expect_malformed(other);
  v1::WorkerReply unasked = right;
  unasked.set_id(right.id() + 100);
  expect_malformed(unasked);
  v1::WorkerReply id = ReplyTo(link_->said[1]);
  id.set_nccl_id(std::string(5000, 'x'));
  expect_malformed(id);
  EXPECT_TRUE(answers_.empty());

  v1::WorkerReply done = right;
  done.mutable_launched();
  ASSERT_TRUE(workers_.Take(done).ok());
  expect_malformed(done);  // twice
  done.set_worker(5);
  EXPECT_TRUE(workers_.Take(done).ok()) << "released, as far as anybody knows";
}

TEST_F(AttachedWorkerTest, ALostOneAnswersEverything) {
  const auto worker = Worker();
  const auto other = Worker(5, "GPU-b");
  Call(worker.get(), Launch());
  Call(other.get(), Launch());
  workers_.Gone(4, absl::UnavailableError("ended"));
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(worker->over());
  EXPECT_FALSE(other->over());
  workers_.Lost(absl::UnavailableError("the node is gone"));
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(other->over());
}

TEST_F(AttachedWorkerTest, AKilledOneAnswersWhenItsNodeHasEndedIt) {
  const auto worker = Worker();
  Call(worker.get(), Launch());
  worker->Kill(absl::UnavailableError("the communicator is broken"));
  EXPECT_TRUE(worker->over());
  EXPECT_TRUE(answers_.empty()) << "its ranks' memory may still be touched";
  EXPECT_NE(link_->said[1].worker_release().status().code(), 0);
  v1::WorkerReply reply = ReplyTo(link_->said[0]);
  *reply.mutable_status() = ToProto(absl::UnavailableError("killed"));
  ASSERT_TRUE(workers_.Take(reply).ok());
  EXPECT_EQ(answers_.size(), 1u);
}

TEST_F(AttachedWorkerTest, AnotherOneOnTheGpuTakesItsPlace) {
  const auto worker = Worker(4, "GPU-a");
  EXPECT_EQ(Worker(4, "GPU-a"), worker);
  EXPECT_NE(Worker(5, "GPU-a"), worker);
  EXPECT_TRUE(worker->over());
}

TEST_F(AttachedWorkerTest, ANodeHasNoEndOfThem) {
  EXPECT_FALSE(workers_.Find(link_, 1, std::string(1000, 'x')).ok());
  std::uint64_t number = 1;
  while (number < 10'000 && workers_.Find(link_, number, std::to_string(number)).ok()) ++number;
  EXPECT_LT(number, 1000u);
}

TEST_F(AttachedWorkerTest, IsReleasedWhenNobodyNeedsItForAWhile) {
  auto worker = Worker();
  clock_.Advance(10 * kIdleNs);
  workers_.Tick(clock_.NowNs());
  worker.reset();
  workers_.Tick(clock_.NowNs());
  EXPECT_TRUE(link_->said.empty()) << "its trainers may come again";
  clock_.Advance(kIdleNs + 1);
  workers_.Tick(clock_.NowNs());
  ASSERT_EQ(link_->said.size(), 1u);
  EXPECT_EQ(link_->said[0].worker_release().worker(), 4u);
  EXPECT_EQ(link_->said[0].worker_release().status().code(), 0);
}

TEST_F(AttachedWorkerTest, ItsMemoryIsItsNodesToFree) {
  const auto worker = Worker();
  worker::Call call;
  call.mutable_remove_arena()->set_arena(17);
  Call(worker.get(), call);
  EXPECT_TRUE(answers_[0].ok());
  call.mutable_ping();
  Call(worker.get(), call);
  EXPECT_FALSE(answers_[1].ok()) << "no call for another node's worker";
  EXPECT_TRUE(link_->said.empty());
}

}  // namespace
}  // namespace gradsync
