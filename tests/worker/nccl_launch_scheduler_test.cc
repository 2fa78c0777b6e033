#include "daemon/worker/nccl_launch_scheduler.h"

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/worker/gpu_arena.h"

namespace gradsync::daemon {
namespace {

// Answers all calls at once, except launches.
class SlowWorker : public WorkerPort {
 public:
  void Call(worker::Call call, std::vector<UniqueFd>, Answered answered) override {
    if (call.has_launch()) {
      launches_.push_back(std::move(answered));
      return;
    }
    Reply reply;
    if (call.has_new_nccl_id()) reply.message.mutable_nccl_id();
    if (call.has_connect()) reply.message.mutable_connected()->set_mps(true);
    answered(std::move(reply));
  }
  void Kill(const absl::Status& why) override { end_ = why; }
  absl::Status EndReason() const override { return end_; }

  std::size_t launches() const { return launches_.size(); }
  // Answers the oldest launch. Its worker has ended if `status` is an error.
  void Answer(const absl::Status& status) {
    const Answered answered = std::move(launches_.front());
    launches_.pop_front();
    if (status.ok()) return answered(Reply());
    answered(status);
  }

 private:
  absl::Status end_;
  std::deque<Answered> launches_;
};

// Its owner lets it go while the scheduler asks whether it has ended.
class LeavingWorker final : public SlowWorker {
 public:
  // At the scheduler's look of this number, counted from now on.
  void LeaveAt(int look, std::function<void()> leave) {
    looks_ = look;
    leave_ = std::move(leave);
  }
  absl::Status EndReason() const override {
    if (looks_ > 0 && --looks_ == 0) leave_();
    return SlowWorker::EndReason();
  }

 private:
  mutable int looks_ = 0;
  std::function<void()> leave_;
};

// One bucket of ranks on several GPUs.
struct Bucket {
  explicit Bucket(const std::vector<std::shared_ptr<SlowWorker>>& workers) {
    auto& device = operation.work.emplace<DeviceReduction>();
    for (const auto& worker : workers) {
      arenas.push_back(GpuArena::OfOtherNode({}, worker, arenas.size() + 1));
      device.arenas.push_back(arenas.back().get());
    }
    operation.done = [this](const ReduceTimes&) { done = true; };
  }
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  std::vector<std::shared_ptr<GpuArena>> arenas;
  ReduceOperation operation;
  bool done = false;
};

// GiveUp() may arrive before a launch of its step. Nothing else would end such a launch, since a
// lost rank writes no ready word.
TEST(NcclLaunchScheduler, LaunchOfAGivenUpStepIsVoidAtOnce) {
  const auto scheduler = std::make_shared<NcclLaunchScheduler>(CollectiveGate::kAuto);
  scheduler->GiveUp({7, 3, {}});
  ReduceOperation operation;
  operation.work.emplace<DeviceReduction>().layout = 7;
  operation.number = 3;
  int done = 0;
  operation.done = [&done](const ReduceTimes&) { ++done; };
  scheduler->Launch(&operation);
  EXPECT_EQ(done, 1);
  EXPECT_TRUE(operation.device().is_void);
  EXPECT_TRUE(operation.failure.ok()) << operation.failure;
  EXPECT_TRUE(scheduler->HasEnded());
}

// A killed worker answers its launches when it has ended. By then the job's next generation may
// have another worker on that GPU.
TEST(NcclLaunchScheduler, LateEndOfAWorkerSparesItsSuccessor) {
  const absl::Status lost = absl::UnavailableError("the worker has ended");
  const auto scheduler = std::make_shared<NcclLaunchScheduler>(CollectiveGate::kNone);
  const auto worker = std::make_shared<SlowWorker>(), ended = std::make_shared<SlowWorker>();
  Bucket bucket({worker, ended});
  scheduler->Launch(&bucket.operation);
  ended->Kill(lost);
  ended->Answer(lost);
  EXPECT_TRUE(worker->HasEnded()) << "it may wait for the lost worker in their all-reduce";
  EXPECT_FALSE(bucket.done) << "it may still use the memory";

  const auto successor = std::make_shared<SlowWorker>(), other = std::make_shared<SlowWorker>();
  Bucket next({successor, other});
  scheduler->Launch(&next.operation);
  EXPECT_EQ(successor->launches(), 0u) << "the old launch is still under way";
  worker->Answer(lost);
  EXPECT_TRUE(bucket.done);
  EXPECT_EQ(bucket.operation.failure, lost);
  for (const auto& one : {successor, other}) {
    EXPECT_FALSE(one->HasEnded()) << one->EndReason();
    ASSERT_EQ(one->launches(), 1u);
    one->Answer(absl::OkStatus());
  }
  EXPECT_TRUE(next.done);
  EXPECT_TRUE(next.operation.failure.ok()) << next.operation.failure;
}

// Otherwise the launch would wait for an answer of that worker for ever.
TEST(NcclLaunchScheduler, AWorkerThatIsLetGoDuringALaunchTakesPartInIt) {
  const auto scheduler = std::make_shared<NcclLaunchScheduler>(CollectiveGate::kNone);
  const auto worker = std::make_shared<SlowWorker>();
  auto leaving = std::make_shared<LeavingWorker>();
  {
    Bucket bucket({worker, leaving});
    scheduler->Launch(&bucket.operation);
    worker->Answer(absl::OkStatus());
    leaving->Answer(absl::OkStatus());
    ASSERT_TRUE(bucket.done);
  }
  const std::weak_ptr<LeavingWorker> weak = leaving;
  // The first look is when the scheduler takes the operation, the second one before it launches.
  leaving->LeaveAt(/*look=*/2, [&leaving] { leaving = nullptr; });
  Bucket alone(std::vector<std::shared_ptr<SlowWorker>>{worker});
  scheduler->Launch(&alone.operation);
  EXPECT_EQ(leaving, nullptr);
  const std::shared_ptr<LeavingWorker> held = weak.lock();
  ASSERT_NE(held, nullptr) << "the launch holds it";
  EXPECT_FALSE(worker->HasEnded()) << worker->EndReason();
  ASSERT_EQ(held->launches(), 1u);
  held->Answer(absl::OkStatus());
  ASSERT_EQ(worker->launches(), 1u);
  worker->Answer(absl::OkStatus());
  EXPECT_TRUE(alone.done);
  EXPECT_TRUE(alone.operation.failure.ok()) << alone.operation.failure;
}

}  // namespace
}  // namespace gradsync::daemon
