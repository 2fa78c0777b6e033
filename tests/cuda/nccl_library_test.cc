#include "daemon/cuda/nccl_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/base/error.h"
#include "daemon/cuda/nccl_errors.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;

TEST(NcclLibrary, MissingLibraryIsAnError) {
  const auto nccl = NcclLibrary::Open("libnccl-of-no-machine.so.2");
  EXPECT_EQ(nccl.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(nccl.status()).reason, "NCCL_MISSING");
}

TEST(NcclLibrary, RefusesAnOldVersion) {
  const auto nccl = NcclLibrary::Open("tests/cuda/libold.so");
  EXPECT_EQ(nccl.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(nccl.status()).reason, "NCCL_TOO_OLD");
  EXPECT_THAT(nccl.status().message(), HasSubstr("is version 2.18.5"));
  EXPECT_THAT(nccl.status().message(), HasSubstr("2.19.0 or newer"));
}

TEST(NcclErrors, EachErrorHasItsReason) {
  const auto reason = [](ncclResult_t result) {
    return DetailsOf(StatusOfNccl(result, "ncclCall", "text", "")).reason;
  };
  EXPECT_TRUE(StatusOfNccl(ncclSuccess, "ncclCall", "", "").ok());
  EXPECT_TRUE(StatusOfNccl(ncclInProgress, "ncclCall", "", "").ok());
  EXPECT_EQ(reason(ncclRemoteError), "NCCL_REMOTE_LOST");
  EXPECT_EQ(reason(ncclUnhandledCudaError), "NCCL_CUDA_ERROR");
  EXPECT_EQ(reason(ncclInvalidUsage), "NCCL_ERROR");
  EXPECT_EQ(StatusOfNccl(ncclInvalidUsage, "ncclCall", "text", "Duplicate GPU\n").message(),
            "ncclCall: text (Duplicate GPU)");
}

}  // namespace
}  // namespace gradsync::daemon
