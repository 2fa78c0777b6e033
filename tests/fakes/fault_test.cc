// Injected faults, and the counters of calls.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>

#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync::fakes {
namespace {

using testing::ElementsAre;

ISOLATED_TEST(Fault, ErrorRuleFailsOneCall, MachineWithGpus(1)) {
  FakeMachine machine;
  EnterContext();
  machine.Inject("cuMemAlloc_v2 2 error 2");
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_SUCCESS);
  EXPECT_EQ(machine.Calls("cuMemAlloc_v2"), 3u);
  EXPECT_EQ(machine.Calls("cuMemAlloc_v2", getpid()), 3u);
  EXPECT_EQ(machine.Calls("cuMemFree_v2"), 0u);
  EXPECT_THAT(machine.Journal(kFault), ElementsAre("cuMemAlloc_v2 2 error 2"));
}

ISOLATED_TEST(Fault, StickyRuleFailsEveryLaterCall, MachineWithGpus(1)) {
  FakeMachine machine;
  EnterContext();
  machine.Inject("cuStreamSynchronize 1+ sticky 719");
  CUstream stream = MakeStream();
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_LAUNCH_FAILED);
  machine.ClearFaults();
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_LAUNCH_FAILED);
}

ROLE(allocator) {
  EnterContext();
  MakeFloats(1);
  return 0;
}

ISOLATED_TEST(Fault, HangEndsWithItsRule, MachineWithGpus(1)) {
  FakeMachine machine;
  machine.Inject("cuMemAlloc_v2 1 hang");
  const auto process = StartRole("allocator", {});
  EXPECT_TRUE(machine.AwaitJournal(kFault, "hang", kPatienceMs));
  machine.ClearFaults();
  EXPECT_TRUE(Succeeds(*process));
}

ISOLATED_TEST(Fault, EnvironmentKillsOneProcess, MachineWithGpus(1)) {
  const auto process =
      StartRole("allocator", {}, {"GRADSYNC_FAKE_CUDA_FAULTS=cuMemAlloc_v2 1 kill"});
  const std::optional<int> status = process->Wait(kPatienceMs);
  ASSERT_TRUE(status.has_value());
  EXPECT_TRUE(WIFSIGNALED(*status) && WTERMSIG(*status) == SIGKILL);
  EXPECT_TRUE(Succeeds(*StartRole("allocator", {})));
  EXPECT_EQ(FakeMachine().DeviceBytes(0), 0u);
}

}  // namespace
}  // namespace gradsync::fakes
