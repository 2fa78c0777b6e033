// The client in a build without CUDA's headers: this program compiles cuda_absent.cc in the place
// of the cuda_* files.

#include <gtest/gtest.h>

#include <string>

#include "client/include/gradsync/client.h"
#include "tests/client/job_of_threads.h"

namespace gradsync {
namespace {

void ExpectAbsent(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_EQ(ErrorReason(status), "CUDA_UNAVAILABLE");
  EXPECT_NE(status.message().find("built without CUDA"), std::string::npos) << status;
}

TEST(CudaAbsentTest, LayoutOnGpuIsUnimplemented) {
  TestDaemon daemon;
  const auto session = Session::Join(OptionsOf(daemon, 0, 1));
  ASSERT_TRUE(session.ok()) << session.status();
  LayoutSpec spec = FloatBuckets(2, 10);
  spec.device = "GPU-00000000-0000-0000-0000-000000000000";
  ExpectAbsent((*session)->RegisterLayout(spec).status());
  ExpectAbsent(CudaDeviceUuid(0).status());
}

TEST(CudaAbsentTest, HostMemoryWorks) {
  TestDaemon daemon;
  const LayoutSpec spec = FloatBuckets(2, 10);
  const JobOfThreads job = JoinAll(daemon, 2, &spec);
  OnEveryRank(2, [&job](std::uint32_t rank) {
    Layout& layout = *job.layouts[rank];
    for (std::size_t i = 0; i < 2; ++i) Fill(layout.bucket(i), static_cast<float>(rank));
    EXPECT_TRUE(MarkAllAndEnd(&layout, 1).ok());
    const auto result = layout.WaitStep(1, absl::Seconds(40));
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(ValueOf(layout.bucket(0)), 0.5f);
    EXPECT_FALSE(layout.MarkReady(2, 0, {nullptr}).ok()) << "it has no streams";
  });
}

}  // namespace
}  // namespace gradsync
