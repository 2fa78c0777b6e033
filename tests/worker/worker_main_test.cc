// gradsyncd as a worker on a machine without a GPU, built with CUDA or without.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "daemon/base/error.h"
#include "daemon/worker/worker_process.h"
#include "tests/engine/event.h"

namespace gradsync::daemon {
namespace {

TEST(WorkerMain, RefusesCallsWithoutCuda) {
  WorkerProcessOptions options;
  options.program = "daemon/gradsyncd";
  Event ended;
  auto process = WorkerProcess::Start(options, [&](const absl::Status& why) { ended.Set(why); });
  ASSERT_TRUE(process.ok()) << process.status();
  for (const char* device : {"", "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5"}) {
    worker::Call call;
    call.mutable_start()->set_cuda_library("libcuda-of-no-machine.so.1");
    call.mutable_start()->set_nccl_library("libnccl-of-no-machine.so.2");
    call.mutable_start()->set_device(device);
    Event answered;
    (*process)->Call(std::move(call), {}, [&](const auto& reply) { answered.Set(reply.status()); });
    const absl::Status status = answered.Wait().value();
    EXPECT_THAT(DetailsOf(status).reason,
                ::testing::AnyOf("CUDA_DRIVER_MISSING", "CUDA_NOT_BUILT"));
  }
  process->reset();  // stops it
  EXPECT_FALSE(ended.Wait(std::chrono::milliseconds(0)).has_value());
}

}  // namespace
}  // namespace gradsync::daemon
