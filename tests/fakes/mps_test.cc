// Which processes may share a GPU (compute modes and MPS), and which processes a fault affects.

#include <sys/wait.h>
#include <unistd.h>

#include <optional>

#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync::fakes {
namespace {

// The exit status is the result of cuDevicePrimaryCtxRetain.
ROLE(context_holder) {
  CUcontext context = nullptr;
  CUDA_OK(cuInit(0));
  const CUresult result = cuDevicePrimaryCtxRetain(&context, 0);
  return result == CUDA_SUCCESS ? 0 : static_cast<int>(result) % 256;
}

int StatusOfHolder() {
  const auto holder = StartRole("context_holder", {});
  const std::optional<int> status = holder->Wait(kPatienceMs);
  return status.has_value() && WIFEXITED(*status) ? WEXITSTATUS(*status) : -1;
}

MachineDescription InMode(ComputeMode mode, bool mps) {
  MachineDescription machine = MachineWithGpus(1);
  machine.gpus[0].mode = mode;
  machine.mps = mps;
  return machine;
}

ISOLATED_TEST(ExclusiveProcess, RefusesASecondProcess,
              InMode(ComputeMode::kExclusiveProcess, false)) {
  EXPECT_EQ(StatusOfHolder(), 0);
  EnterContext();
  EXPECT_EQ(StatusOfHolder(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  int mode = 0;
  CUDA_OK(cuDeviceGetAttribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0));
  EXPECT_EQ(mode, CU_COMPUTEMODE_EXCLUSIVE_PROCESS);
}

ISOLATED_TEST(ExclusiveProcess, IsSharedUnderMps, InMode(ComputeMode::kExclusiveProcess, true)) {
  EnterContext();
  EXPECT_EQ(StatusOfHolder(), 0);
}

ISOLATED_TEST(ExclusiveProcess, ProhibitedRefusesAll, InMode(ComputeMode::kProhibited, false)) {
  EXPECT_EQ(StatusOfHolder(), CUDA_ERROR_DEVICE_UNAVAILABLE);
}

MachineDescription WithMps() { return InMode(ComputeMode::kDefault, true); }

ISOLATED_TEST(Mps, FaultReachesAllProcesses, WithMps()) {
  const FakeMachine machine;
  CUDA_OK(cuInit(0));
  int mps = 0;
  CUDA_OK(cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 0));
  EXPECT_EQ(mps, 1);
  EnterContext();
  const auto client = StartRole("mps_faulter", {});
  EXPECT_TRUE(Succeeds(*client));
  // The other process's fault affects this one too. While this one lives, MPS refuses new clients.
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(StatusOfHolder(), static_cast<int>(CUDA_ERROR_MPS_SERVER_NOT_READY) % 256);
}

ROLE(mps_faulter) {
  EnterContext();
  CUstream stream = MakeStream();
  CUDA_OK(cuMemsetD8Async(0x1000, 0, 1, stream));
  return cuStreamSynchronize(stream) == CUDA_ERROR_ILLEGAL_ADDRESS ? 0 : 1;
}

ISOLATED_TEST(Mps, FaultStaysInItsProcessWithoutMps, MachineWithGpus(1)) {
  EnterContext();
  const auto client = StartRole("mps_faulter", {});
  EXPECT_TRUE(Succeeds(*client));
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(StatusOfHolder(), 0);
}

ROLE(other_user) {
  if (setuid(65533) != 0) return 1;
  EnterContext();
  return 0;
}

ISOLATED_TEST(Mps, AnotherUsersContextWaits, WithMps()) {
  if (getuid() != 0) GTEST_SKIP() << "only root can be another user";
  const FakeMachine machine;
  EnterContext();
  const auto other = StartRole("other_user", {});
  EXPECT_TRUE(machine.AwaitJournal(kBlocked, "another user's MPS", kPatienceMs));
  CUDA_OK(cuDevicePrimaryCtxRelease(0));
  EXPECT_TRUE(Succeeds(*other));
}

}  // namespace
}  // namespace gradsync::fakes
