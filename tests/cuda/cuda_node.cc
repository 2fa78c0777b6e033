#include "tests/cuda/cuda_node.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <thread>

#include "gradsync/v1/introspection.pb.h"
#include "tests/cuda/cuda_rank.h"

namespace gradsync {
namespace {

// The fake's smallest allocation, which is enough for an arena.
constexpr std::size_t kArenaBytes = std::size_t{2} << 20;

// The path of a file that the build puts beside this program.
std::string Absolute(const std::string& path) { return std::filesystem::absolute(path).string(); }

}  // namespace

CudaNode::CudaNode(int gpus)
    : daemon_({"--cuda_library=" + Absolute("tests/fakes/cuda/libcuda.so.1"),
               "--nccl_library=" + Absolute("tests/fakes/nccl/libnccl.so.2")}) {
  std::vector<std::unique_ptr<CudaRank>> ranks;
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    ranks.push_back(std::make_unique<CudaRank>(gpu));
    threads.emplace_back([this, gpus, gpu, &rank = *ranks.back()] {
      const auto ok = [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; };
      ok(rank.Join(Options(static_cast<std::uint32_t>(gpu), static_cast<std::uint32_t>(gpus))));
      ok(rank.Register(CudaLayout(gpu, kBuckets, kCount)));
      ok(rank.Step(1, 0));
      ok(rank.WaitStep(1).status());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int gpu = 0; machine_.fake() && gpu < gpus; ++gpu) {
    idle_bytes_.push_back(machine_.DeviceBytes(static_cast<std::uint32_t>(gpu)) - kArenaBytes);
  }
  for (const auto& rank : ranks) EXPECT_TRUE(rank->Leave().ok());
  for (const auto& rank : ranks) rank->End();
  ExpectNothingKept();
}

CudaNode::~CudaNode() {
  if (machine_.fake()) {
    EXPECT_EQ(machine_.Calls("cuInit", daemon_.pid()), 0u);
  }
  std::ifstream maps("/proc/" + std::to_string(daemon_.pid()) + "/maps");
  const std::string mapped{std::istreambuf_iterator<char>(maps), {}};
  EXPECT_THAT(mapped, testing::HasSubstr("gradsyncd"));
  EXPECT_THAT(mapped, testing::Not(testing::HasSubstr("libcuda")));
  EXPECT_EQ(machine_.Violations(), violations_);
}

SessionOptions CudaNode::Options(std::uint32_t rank, std::uint32_t world_size,
                                 absl::Duration step_timeout) const {
  SessionOptions options;
  options.socket = daemon_.socket();
  options.job_id = "job";
  options.rank = rank;
  options.world_size = world_size;
  options.step_timeout = step_timeout;
  return options;
}

std::vector<pid_t> CudaNode::WorkerPids(const std::string& job) const {
  const v1::GetStatusResponse status = daemon_.Status();
  std::vector<pid_t> pids;
  for (const v1::WorkerStatus& worker : status.cuda().workers()) {
    if (worker.job_id() == job) pids.push_back(worker.pid());
  }
  return pids;
}

std::uint64_t CudaNode::Workers() const {
  if (machine_.fake()) return machine_.Calls("cuModuleLoadData");
  std::uint64_t started = 0;
  const v1::GetStatusResponse status = daemon_.Status();
  for (const v1::WorkerStatus& worker : status.cuda().workers()) started += 1 + worker.restarts();
  return started;
}

void CudaNode::ExpectNothingKept() {
  EXPECT_TRUE(daemon_.AwaitStatus([](const v1::GetStatusResponse& now) {
    return now.cuda().arena_bytes() == 0;
  })) << daemon_.Status().cuda().arena_bytes()
      << " bytes of arenas";
  for (std::uint32_t gpu = 0; gpu < idle_bytes_.size(); ++gpu) {
    EXPECT_TRUE(machine_.AwaitDeviceBytes(gpu, idle_bytes_[gpu], kPatienceMs))
        << "GPU " << gpu << " holds " << machine_.DeviceBytes(gpu) << " bytes, " << idle_bytes_[gpu]
        << " before";
  }
}

}  // namespace gradsync
