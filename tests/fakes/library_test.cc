// The product opens the fakes at run time, and calls them through its tables of functions.

#include <dlfcn.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>

#include "daemon/cuda/cuda_driver.h"
#include "daemon/cuda/nccl_library.h"
#include "tests/fakes/isolated_test.h"

namespace gradsync::fakes {
namespace {

using testing::HasSubstr;

std::string Library(const std::string& name) {
  const char* const folder = std::getenv("TEST_SRCDIR");
  return std::string(folder == nullptr ? "." : folder) + "/gradsync/tests/fakes/" + name;
}
const std::string& DriverPath() {
  static const auto* const path = new std::string(Library("cuda/libcuda.so.1"));
  return *path;
}

decltype(&cuGetProcAddress) Finder() {
  void* const library = dlopen(DriverPath().c_str(), RTLD_NOW);
  EXPECT_NE(library, nullptr) << dlerror();
  return reinterpret_cast<decltype(&cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
}

void* Find(const char* name, int version) {
  void* function = nullptr;
  Finder()(name, &function, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr);
  return function;
}

ISOLATED_TEST(Library, FillsTheProductsTables, MachineWithGpus(1)) {
  const auto driver = daemon::CudaDriver::Open(DriverPath());
  ASSERT_TRUE(driver.ok()) << driver.status();
  EXPECT_TRUE((*driver)->cuInit(0).ok());
  CUcontext context = nullptr;
  EXPECT_TRUE((*driver)->cuDevicePrimaryCtxRetain(&context, 0).ok());
  const absl::Status refused = (*driver)->cuDevicePrimaryCtxRetain(&context, 1);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("CUDA_ERROR_INVALID_DEVICE"));

  const auto nccl = daemon::NcclLibrary::Open(Library("nccl/libnccl.so.2"));
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  EXPECT_EQ((*nccl)->version(), NCCL_VERSION_CODE);
  // The fake of NCCL finds the driver, though the process has opened the driver by its path.
  EXPECT_TRUE((*driver)->cuCtxSetCurrent(context).ok());
  void* memory = nullptr;
  EXPECT_EQ((*nccl)->ncclMemAlloc(&memory, 1), ncclSuccess);
}

MachineDescription WithOldNccl() {
  MachineDescription machine = MachineWithGpus(1);
  machine.nccl_version = 21800;
  return machine;
}

ISOLATED_TEST(Library, OldNcclReportsItsVersion, WithOldNccl()) {
  const auto nccl = daemon::NcclLibrary::Open(Library("nccl/libnccl.so.2"));
  ASSERT_FALSE(nccl.ok());
  EXPECT_THAT(std::string(nccl.status().message()), HasSubstr("2.18"));
}

ISOLATED_TEST(Library, OpenInitializesNothing, MachineWithGpus(1)) {
  const FakeMachine machine;
  ASSERT_TRUE(daemon::CudaDriver::Open(DriverPath()).ok());
  EXPECT_EQ(machine.Calls("cuInit"), 0u);
  EXPECT_EQ(machine.DeviceBytes(0), 0u);
}

ISOLATED_TEST(ProcAddress, FindsTheNewestVariantUpToAVersion, MachineWithGpus(1)) {
  EXPECT_NE(Find("cuStreamWaitValue64", 9000), Find("cuStreamWaitValue64", 11070));
  EXPECT_EQ(Find("cuStreamWaitValue64", 11070), Find("cuStreamWaitValue64", 13000));
  // The variants even have different parameters.
  EXPECT_NE(Find("cuCtxSynchronize", 12000), Find("cuCtxSynchronize", 13000));
}

ISOLATED_TEST(ProcAddress, FindsNoSuffixedNamesAndNoFutureVersions, MachineWithGpus(1)) {
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  void* function = nullptr;
  EXPECT_EQ(Finder()("cuMemAlloc_v2", &function, 13000, CU_GET_PROC_ADDRESS_DEFAULT, nullptr),
            CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(Finder()("cuFuncLoad", &function, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status),
            CUDA_SUCCESS);
  EXPECT_EQ(function, nullptr);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
}

MachineDescription WithOldDriver() {
  MachineDescription machine = MachineWithGpus(1);
  machine.driver_version = 12020;
  return machine;
}

ISOLATED_TEST(ProcAddress, OldDriverLacksNewerFunctions, WithOldDriver()) {
  EXPECT_EQ(Find("cuFuncLoad", 13000), nullptr);
  EXPECT_FALSE(daemon::CudaDriver::Open(DriverPath()).ok());
}

}  // namespace
}  // namespace gradsync::fakes
