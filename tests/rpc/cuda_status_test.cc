#include "daemon/rpc/cuda_status.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>

#include <string>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

template <typename Message>
Message FromText(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

worker::Started TwoGpus() {
  return FromText<worker::Started>(R"pb(
    driver_version: 12080
    nccl_error: "no NCCL"
    devices { uuid: "GPU-1" name: "H200" memory_bytes: 100 mps: true }
    devices { uuid: "GPU-2" name: "H200" memory_bytes: 100 }
  )pb");
}

WorkerStatus OpenWorker(const std::string& device) {
  WorkerStatus worker;
  worker.key = {"1000/digits", device, Tenant(1000), "digits"};
  worker.pid = 7;
  worker.open = true;
  worker.started = FromText<worker::Started>(
      "driver_version: 13000 nccl_version: '2.28.9' devices { uuid: '" + device + "' }");
  worker.memory = FromText<worker::Pong>("arena_bytes: 4 free_bytes: 60 total_bytes: 100");
  return worker;
}

TEST(CudaStatus, ListsDriverNcclAndGpus) {
  const v1::CudaStatus status = CudaStatusOf(TwoGpus(), {});
  EXPECT_EQ(status.driver_version(), "12.8");
  EXPECT_EQ(status.nccl_error(), "no NCCL");
  ASSERT_EQ(status.gpus_size(), 2);
  EXPECT_EQ(status.gpus(0).sharing(), v1::GPU_SHARING_MPS);
  EXPECT_EQ(status.gpus(1).sharing(), v1::GPU_SHARING_TIME_SLICED);
  EXPECT_FALSE(status.gpus(1).has_free_bytes());
}

TEST(CudaStatus, WorkerReportsFreeMemory) {
  const v1::CudaStatus status = CudaStatusOf(TwoGpus(), {OpenWorker("GPU-2")});
  ASSERT_EQ(status.gpus_size(), 2);
  EXPECT_FALSE(status.gpus(0).has_free_bytes());
  EXPECT_EQ(status.gpus(1).free_bytes(), 60u);
}

TEST(CudaStatus, WorkerReportsMigInstanceAndLateDriver) {
  const v1::CudaStatus status =
      CudaStatusOf(absl::NotFoundError("no CUDA driver"), {OpenWorker("MIG-3")});
  EXPECT_EQ(status.driver_version(), "13.0");
  EXPECT_EQ(status.nccl_version(), "2.28.9");
  EXPECT_THAT(status.driver_error(), IsEmpty());
  ASSERT_EQ(status.gpus_size(), 1);
  EXPECT_EQ(status.gpus(0).uuid(), "MIG-3");
}

TEST(CudaStatus, ReportsWhyThereIsNoDriver) {
  EXPECT_EQ(CudaStatusOf(absl::NotFoundError("no CUDA driver"), {}).driver_error(),
            "no CUDA driver");
}

TEST(CudaStatus, ReportsTheWorkersState) {
  WorkerStatus worker = OpenWorker("GPU-1");
  worker.restarts = 2;
  const v1::WorkerStatus status = WorkerStatusOf(worker);
  EXPECT_EQ(status.state(), v1::WORKER_STATE_RUNNING);
  EXPECT_EQ(status.job_id(), "digits");
  EXPECT_EQ(status.uid(), 1000u);
  EXPECT_EQ(status.restarts(), 2u);
  EXPECT_EQ(status.arena_bytes(), 4u);
  worker.open = false;
  EXPECT_EQ(WorkerStatusOf(worker).state(), v1::WORKER_STATE_STARTING);
  worker.pid = 0;
  EXPECT_EQ(WorkerStatusOf(worker).state(), v1::WORKER_STATE_FAILED);
  worker.awaits_turn = true;
  EXPECT_EQ(WorkerStatusOf(worker).state(), v1::WORKER_STATE_STARTING);
}

TEST(CudaStatus, WarnsIfOnlyOneSideUsesMps) {
  const v1::CudaStatus cuda = CudaStatusOf(TwoGpus(), {});
  const auto rank = FromText<v1::SessionStatus>(R"pb(
    rank: 3
    gpu_uses { gpu: "GPU-1" sharing: GPU_SHARING_TIME_SLICED }
    gpu_uses { gpu: "GPU-1" sharing: GPU_SHARING_TIME_SLICED }
    gpu_uses { gpu: "GPU-2" sharing: GPU_SHARING_MPS }
  )pb");
  EXPECT_THAT(MpsWarnings("digits", rank, cuda),
              ElementsAre(HasSubstr("job digits rank 3: only the daemon's worker uses GPU-1 "
                                    "through MPS, so its kernels and those of the rank's process "
                                    "take turns"),
                          HasSubstr("only the rank's process uses GPU-2 through MPS")));
  const auto same = FromText<v1::SessionStatus>(R"pb(
    gpu_uses { gpu: "GPU-1" sharing: GPU_SHARING_MPS }
  )pb");
  EXPECT_THAT(MpsWarnings("digits", same, cuda), IsEmpty());
}

}  // namespace
}  // namespace gradsync::daemon
