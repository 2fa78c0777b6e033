#include "daemon/worker/nccl_launch_scheduler.h"

#include <gtest/gtest.h>

#include <deque>
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

}  // namespace
}  // namespace gradsync::daemon
