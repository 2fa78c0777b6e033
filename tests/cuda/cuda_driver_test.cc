#include "daemon/cuda/cuda_driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/base/error.h"
#include "daemon/cuda/cuda_device.h"
#include "daemon/cuda/cuda_errors.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;

TEST(CudaDriver, MissingDriverIsAnError) {
  const auto driver = CudaDriver::Open("libcuda-of-no-machine.so.1");
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(driver.status()).reason, "CUDA_DRIVER_MISSING");
  EXPECT_THAT(driver.status().message(), HasSubstr("libcuda-of-no-machine.so.1"));
}

TEST(CudaDriver, OldDriverIsRefusedWithWhatItLacks) {
  const auto driver = CudaDriver::Open("tests/cuda/libold.so");
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(driver.status()).reason, "CUDA_DRIVER_TOO_OLD");
  EXPECT_THAT(driver.status().message(), HasSubstr("cuGetProcAddress_v2"));
  EXPECT_THAT(driver.status().message(), HasSubstr("CUDA 13.0 or newer (580 or newer)"));
}

TEST(CudaErrors, EachErrorHasItsReason) {
  const auto reason = [](CUresult result) {
    return DetailsOf(StatusOfCuda(result, "cuCall", "NAME", "text")).reason;
  };
  EXPECT_TRUE(StatusOfCuda(CUDA_SUCCESS, "cuCall", "NAME", "text").ok());
  EXPECT_EQ(reason(CUDA_ERROR_ILLEGAL_ADDRESS), "GPU_FAULT");
  EXPECT_EQ(reason(CUDA_ERROR_MPS_CLIENT_TERMINATED), "GPU_FAULT");
  EXPECT_EQ(reason(CUDA_ERROR_OUT_OF_MEMORY), "GPU_OUT_OF_MEMORY");
  EXPECT_EQ(reason(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED), "MPS_FULL");
  EXPECT_EQ(reason(CUDA_ERROR_NO_DEVICE), "GPU_UNUSABLE");
  EXPECT_EQ(reason(CUDA_ERROR_OPERATING_SYSTEM), "GPU_UNUSABLE");
  EXPECT_EQ(reason(CUDA_ERROR_INVALID_VALUE), "CUDA_ERROR");
  for (const CUresult kernels : {CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU,
                                 CUDA_ERROR_UNSUPPORTED_PTX_VERSION}) {
    const absl::Status old = StatusOfCuda(kernels, "cuModuleLoadData", "NAME", "text");
    EXPECT_EQ(old.code(), absl::StatusCode::kFailedPrecondition) << kernels;
    EXPECT_EQ(DetailsOf(old).reason, "CUDA_DRIVER_TOO_OLD") << kernels;
    EXPECT_THAT(old.message(), HasSubstr("580 or newer")) << kernels;
  }
  const absl::Status status = StatusOfCuda(CUDA_ERROR_NO_DEVICE, "cuInit", "NAME", "text");
  EXPECT_EQ(status.message(), "cuInit: NAME (text)");
  EXPECT_FALSE(EndsProcess(CUDA_ERROR_OUT_OF_MEMORY));
  EXPECT_FALSE(EndsProcess(CUDA_ERROR_NOT_READY));
  EXPECT_TRUE(EndsProcess(CUDA_ERROR_ECC_UNCORRECTABLE));
}

TEST(CudaDevice, UuidHasTheFormOfNvidiaSmi) {
  EXPECT_TRUE(CheckCudaDeviceUuid("GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5").ok());
  EXPECT_TRUE(CheckCudaDeviceUuid("MIG-b8ea3855-276c-c9cb-b366-c6fa655957c5").ok());
  for (const char* wrong :
       {"", "0", "GPU-", "cuda:0", "GPU-b8ea3855276cc9cbb366c6fa655957c5",
        "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5 ", "GPU-B8EA3855-276C-C9CB-B366-C6FA655957C5"}) {
    EXPECT_EQ(CheckCudaDeviceUuid(wrong).code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
}

}  // namespace
}  // namespace gradsync::daemon
