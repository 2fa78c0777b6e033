// Devices and contexts: which ones a process sees, and what calls require.

#include <stdlib.h>

#include <string>

#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/in_child.h"

namespace gradsync::fakes {
namespace {

int DeviceCount() {
  int count = 0;
  CUDA_OK(cuDeviceGetCount(&count));
  return count;
}

// The last digit of a device's UUID, as GpuUuid made it.
int UuidNumber(CUdevice device) {
  CUuuid uuid{};
  CUDA_OK(cuDeviceGetUuid(&uuid, device));
  return uuid.bytes[15];
}

TEST(Driver, WithoutAMachineThereIsNoDevice) {
  if (Isolated()) return;
  EXPECT_EQ(cuInit(0), CUDA_ERROR_NO_DEVICE);
}

ISOLATED_TEST(Device, RequiresInitialization, MachineWithGpus(1)) {
  int count = 0;
  EXPECT_EQ(cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
  CUcontext context = nullptr;
  EXPECT_EQ(cuDevicePrimaryCtxRetain(&context, 0), CUDA_ERROR_NOT_INITIALIZED);
}

ISOLATED_TEST(Device, HasNameMemoryAndAttributes, MachineWithGpus(3)) {
  CUDA_OK(cuInit(0));
  EXPECT_EQ(DeviceCount(), 3);
  EXPECT_EQ(UuidNumber(2), 2);
  CUdevice device = 0;
  EXPECT_EQ(cuDeviceGet(&device, 3), CUDA_ERROR_INVALID_DEVICE);
  int mps = -1, words = -1;
  CUDA_OK(cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 0));
  CUDA_OK(cuDeviceGetAttribute(&words, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0));
  EXPECT_EQ(mps, 0);
  EXPECT_EQ(words, 1);
  std::size_t bytes = 0;
  CUDA_OK(cuDeviceTotalMem(&bytes, 0));
  EXPECT_EQ(bytes, 1024 * kMebibyte);
}

ISOLATED_TEST(Device, IsChosenByCudaVisibleDevices, MachineWithGpus(3)) {
  setenv("CUDA_VISIBLE_DEVICES", ("2," + GpuUuid(0) + ",nothing,1").c_str(), 1);
  CUDA_OK(cuInit(0));
  ASSERT_EQ(DeviceCount(), 2);
  EXPECT_EQ(UuidNumber(0), 2);
  EXPECT_EQ(UuidNumber(1), 0);
}

ISOLATED_TEST(Device, NoVisibleDeviceIsAnError, MachineWithGpus(1)) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_EQ(cuInit(0), CUDA_ERROR_NO_DEVICE);
}

MachineDescription MigMachine() {
  MachineDescription machine = MachineWithGpus(2);
  machine.gpus[0].uuid = MigUuid(7);
  machine.gpus[1].uuid = MigUuid(8);
  return machine;
}

ISOLATED_TEST(Device, ProcessSeesOneMigDevice, MigMachine()) {
  setenv("CUDA_VISIBLE_DEVICES", MigUuid(8).c_str(), 1);
  CUDA_OK(cuInit(0));
  ASSERT_EQ(DeviceCount(), 1);
  EXPECT_EQ(UuidNumber(0), 8);
}

ISOLATED_TEST(Context, MustBeCurrent, MachineWithGpus(1)) {
  CUcontext context = EnterContext();
  CUDA_OK(cuCtxSetCurrent(nullptr));
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_ERROR_INVALID_CONTEXT);
  CUDA_OK(cuCtxPushCurrent(context));
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_SUCCESS);
  CUDA_OK(cuCtxPopCurrent(nullptr));
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_ERROR_INVALID_CONTEXT);
}

ISOLATED_TEST(Context, StreamOfAnotherContextIsRefused, MachineWithGpus(2)) {
  CUcontext first = EnterContext(0);
  CUstream stream = MakeStream();
  EnterContext(1);
  EXPECT_EQ(cuEventRecord(MakeEvent(), stream), CUDA_ERROR_INVALID_HANDLE);
  CUcontext owner = nullptr;
  CUDA_OK(cuStreamGetCtx(stream, &owner));
  EXPECT_EQ(owner, first);
}

ISOLATED_TEST(Context, ForkedChildHasNoContext, MachineWithGpus(1)) {
  EnterContext();
  EXPECT_EQ(InChild([] {
              int count = 0;
              return cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED &&
                             cuInit(0) == CUDA_ERROR_NOT_INITIALIZED
                         ? 0
                         : 1;
            }),
            0);
}

}  // namespace
}  // namespace gradsync::fakes
