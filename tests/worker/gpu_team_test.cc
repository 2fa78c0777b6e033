#include "daemon/worker/gpu_team.h"

#include <gtest/gtest.h>

namespace gradsync {
namespace {

// The word that a step is void may overtake a launch of it, which nobody would end then: a rank
// that has died writes no ready word.
TEST(GpuTeam, ALaunchOfAStepThatWasGivenUpIsDoneAtOnceAndVoid) {
  const auto team = std::make_shared<GpuTeam>(CollectiveGate::kAuto);
  team->GiveUp({7, 3, {}});
  ReduceOperation operation;
  operation.gpu.layout = 7;
  operation.number = 3;
  int done = 0;
  operation.done = [&done](const ReduceTimes&) { ++done; };
  team->Launch(&operation);
  EXPECT_EQ(done, 1);
  EXPECT_TRUE(operation.gpu.is_void);
  EXPECT_TRUE(operation.failure.ok()) << operation.failure;
  EXPECT_TRUE(team->Over());
}

}  // namespace
}  // namespace gradsync
