#include "daemon/worker/nccl_launch_scheduler.h"

#include <gtest/gtest.h>

namespace gradsync::daemon {
namespace {

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

}  // namespace
}  // namespace gradsync::daemon
