#include "daemon/peer/lent_workers.h"

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/error.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"
#include "proto/gradsync/data_type.h"
#include "tests/peer/fake_worker.h"

namespace gradsync {
namespace {

constexpr std::uint64_t kArena = 7;
constexpr std::uint64_t kOtherArena = 8;  // of another worker

class LentWorkersTest : public testing::Test {
 protected:
  LentWorkersTest() {
    LentWorkers::Owner owner;
    owner.send = [this](v1::AttachRequest message) { said_.push_back(std::move(message)); };
    owner.find = [this](std::uint64_t arena, std::uint32_t bucket,
                        std::uint64_t step) -> absl::StatusOr<LentBucket> {
      if (arena > kOtherArena || bucket >= 2) return absl::FailedPreconditionError("no bucket");
      return LentBucket{arena == kArena ? worker_.get() : nullptr,
                        DataType::kBfloat16,
                        1000,
                        512 + bucket,
                        4096 + step,
                        2,
                        semaphores_};
    };
    owner.settled = [] {};
    lent_ = std::make_shared<LentWorkers>(std::move(owner));
    number_ = lent_->NumberOf(worker_);
  }

  // A worker answers every call in the end.
  ~LentWorkersTest() override {
    if (worker_ != nullptr) worker_->answers.clear();
  }

  v1::WorkerCall Call() {
    v1::WorkerCall call;
    call.set_worker(number_);
    call.set_id(++last_id_);
    return call;
  }
  v1::WorkerCall Launch() {
    v1::WorkerCall call = Call();
    auto* const launch = call.mutable_launch();
    launch->set_layout(3);
    launch->set_step(5);
    launch->set_bucket(1);
    launch->set_dtype(v1::DATA_TYPE_BFLOAT16);
    launch->set_staging_dtype(v1::DATA_TYPE_FLOAT32);
    launch->set_count(1000);
    launch->set_scale(0.25);
    launch->set_step_buckets(2);
    launch->add_arenas(kArena);
    return call;
  }
  v1::WorkerCall Connect() {
    v1::WorkerCall call = Call();
    call.mutable_connect()->set_unique_id(std::string(128, 'x'));
    call.mutable_connect()->set_rank(2);
    call.mutable_connect()->set_ranks(4);
    call.mutable_connect()->set_limit_ms(1000);
    return call;
  }
  // What is said of the last call.
  const v1::WorkerReply& Said() { return said_.back().worker_reply(); }

  // It is answered with an error, and the worker never hears of it.
  void ExpectRefused(const v1::WorkerCall& call) {
    const std::size_t calls = worker_->calls.size();
    lent_->Call(call);
    EXPECT_EQ(worker_->calls.size(), calls) << call.ShortDebugString();
    ASSERT_FALSE(said_.empty());
    EXPECT_EQ(Said().id(), call.id());
    EXPECT_NE(Said().status().code(), 0) << call.ShortDebugString();
    EXPECT_FALSE(lent_->busy());
  }

  std::shared_ptr<FakeWorker> worker_ = std::make_shared<FakeWorker>();
  std::shared_ptr<SemaphorePage> semaphores_ = *SemaphorePage::Create(2);
  std::vector<v1::AttachRequest> said_;
  std::shared_ptr<LentWorkers> lent_;
  std::uint64_t number_ = 0;
  std::uint64_t last_id_ = 0;
};

TEST_F(LentWorkersTest, ALaunchGoesWhereThisNodesPlanHasTheBucket) {
  lent_->Call(Launch());
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
  ASSERT_EQ(launch.arenas_size(), 1);
  EXPECT_EQ(launch.arenas(0), kArena);

  EXPECT_TRUE(lent_->busy());
  EXPECT_TRUE(said_.empty());
  WorkerPort::Reply reply;
  reply.message.mutable_launch_done()->set_void_step(true);
  reply.message.mutable_launch_done()->set_sum_of_squares(2.5);
  worker_->Answer(std::move(reply));
  EXPECT_EQ(Said().id(), last_id_);
  EXPECT_EQ(Said().status().code(), 0);
  EXPECT_TRUE(Said().launched().void_step());
  EXPECT_EQ(Said().launched().sum_of_squares(), 2.5);
  EXPECT_FALSE(lent_->busy());
}

TEST_F(LentWorkersTest, WhatCannotBeRightIsRefusedAndAnswered) {
  const auto launch = [this](const std::function<void(v1::WorkerCall::Launch*)>& spoil) {
    v1::WorkerCall call = Launch();
    spoil(call.mutable_launch());
    ExpectRefused(call);
  };
  launch([](auto* l) { l->set_dtype(v1::DATA_TYPE_UNSPECIFIED); });
  launch([](auto* l) { l->set_dtype(static_cast<v1::DataType>(99)); });
  launch([](auto* l) { l->set_count(std::numeric_limits<std::uint64_t>::max()); });
  launch([](auto* l) { l->set_count(999); });
  launch([](auto* l) { l->set_staging_dtype(v1::DATA_TYPE_FLOAT64); });
  launch([](auto* l) { l->set_staging_dtype(v1::DATA_TYPE_FLOAT16); });
  launch([](auto* l) { l->set_dtype(v1::DATA_TYPE_FLOAT16); });
  launch([](auto* l) { l->set_bucket(2); });
  launch([](auto* l) { l->set_step_buckets(0); });
  launch([](auto* l) { l->set_step_buckets(3); });
  launch([](auto* l) { l->add_arenas(kArena); });
  launch([](auto* l) { l->add_arenas(kOtherArena); });
  launch([](auto* l) { l->set_arenas(0, 1000); });

  const auto connect = [this](const std::function<void(v1::WorkerCall::Connect*)>& spoil) {
    v1::WorkerCall call = Connect();
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
  connect([](auto* c) { c->set_limit_ms(std::numeric_limits<std::uint64_t>::max()); });

  for (const std::uint64_t arena : {kOtherArena, std::uint64_t{1000}}) {
    v1::WorkerCall await = Call();
    await.mutable_await_ready()->add_arenas(arena);
    ExpectRefused(await);
  }

  ExpectRefused(Call());  // of no kind that this node knows
  v1::WorkerCall call = Launch();
  call.set_worker(99);
  ExpectRefused(call);
  EXPECT_TRUE(Said().over());
}

TEST_F(LentWorkersTest, TellsWhenGradientsAreThere) {
  v1::WorkerCall call = Call();
  call.mutable_await_ready()->set_layout(3);
  call.mutable_await_ready()->set_step(5);
  call.mutable_await_ready()->set_bucket(1);
  call.mutable_await_ready()->add_arenas(kArena);
  lent_->Call(call);
  const worker::AwaitReady& await = worker_->calls.at(0).await_ready();
  EXPECT_EQ(await.layout(), 3u);
  EXPECT_EQ(await.step(), 5u);
  EXPECT_EQ(await.bucket(), 1u);
  EXPECT_EQ(await.arenas(0), kArena);
  worker_->Answer(WorkerPort::Reply{});
  EXPECT_EQ(Said().id(), call.id());
  EXPECT_EQ(Said().status().code(), 0);
}

TEST_F(LentWorkersTest, AConnectedWorkerStaysUntilItIsReleased) {
  const std::weak_ptr<FakeWorker> worker = worker_;
  lent_->Call(Connect());
  worker_->Answer(WorkerPort::Reply{});
  worker_.reset();
  ASSERT_FALSE(worker.expired()) << "nobody else needs it, but the job's other workers do";
  EXPECT_EQ(worker.lock()->calls.back().connect().rank(), 2u);

  v1::WorkerRelease release;
  release.set_worker(number_);
  lent_->Release(release);
  ASSERT_FALSE(worker.expired()) << "it disconnects first";
  EXPECT_TRUE(worker.lock()->calls.back().has_disconnect());
  worker.lock()->Answer(WorkerPort::Reply{});
  worker.lock()->answers.clear();
  EXPECT_TRUE(worker.expired());
  lent_->Tick();
  EXPECT_EQ(said_.back().worker_gone().worker(), number_);
}

TEST_F(LentWorkersTest, AWorkerThatEndsIsToldOfOnce) {
  lent_->Tick();
  EXPECT_TRUE(said_.empty());
  worker_->Kill(absl::UnavailableError("killed"));
  lent_->Tick();
  lent_->Tick();
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_EQ(said_[0].worker_gone().worker(), number_);
  EXPECT_NE(said_[0].worker_gone().status().code(), 0);
  EXPECT_NE(lent_->NumberOf(std::make_shared<FakeWorker>()), number_);
}

TEST_F(LentWorkersTest, ABrokenCommunicatorsWorkerIsKilled) {
  lent_->Call(Launch());
  v1::WorkerRelease release;
  release.set_worker(number_);
  *release.mutable_status() = ToProto(absl::UnavailableError("another node's worker is lost"));
  lent_->Release(release);
  EXPECT_EQ(worker_->killed.message(), "another node's worker is lost");
  EXPECT_NE(Said().status().code(), 0) << "what it owed is answered";
  EXPECT_TRUE(Said().over());
}

TEST_F(LentWorkersTest, WithoutACoordinatorOnlyWhatIsAtWorkIsKilled) {
  const auto resting = std::make_shared<FakeWorker>();
  v1::WorkerCall connect = Connect();
  connect.set_worker(lent_->NumberOf(resting));
  lent_->Call(connect);
  resting->Answer(WorkerPort::Reply{});
  lent_->Call(Launch());
  lent_->End(absl::UnavailableError("lost"));
  EXPECT_TRUE(worker_->over());
  EXPECT_FALSE(resting->over());
  EXPECT_TRUE(resting->calls.back().has_disconnect());
  EXPECT_FALSE(lent_->busy()) << "nothing touches the ranks' memory";
  resting->answers.clear();  // they keep it
}

}  // namespace
}  // namespace gradsync
