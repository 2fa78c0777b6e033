// gradsync-bench --device cuda from outside, on fake GPUs. Its figures mean nothing there.

#include <gmock/gmock.h>
#include <stdlib.h>

#include <map>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/bench/bench_fixture.h"
#include "tests/fakes/control.h"

namespace gradsync::bench {
namespace {

using fakes::FakeMachine;
using fakes::MachineWithGpus;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CudaBenchTest : public BenchTest {
 protected:
  int RunOn(const FakeMachine& machine, std::vector<std::string> arguments) {
    std::string variable = machine.Environment();
    const std::size_t equals = variable.find('=');
    setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
    for (const char* argument :
         {"--device", "cuda", "--cuda_library", "tests/fakes/cuda/libcuda.so.1", "--nccl_library",
          "tests/fakes/nccl/libnccl.so.2", "--json"}) {
      arguments.emplace_back(argument);
    }
    arguments.push_back(json());
    return Run(arguments);
  }

  // How many rows each implementation has.
  std::map<std::string, int> Rows() {
    std::map<std::string, int> rows;
    for (const nlohmann::json& row : document()) ++rows[row["impl"]];
    return rows;
  }
};

TEST_F(CudaBenchTest, ComparesTheTrainersOfAGpuWithCopies) {
  const FakeMachine machine(MachineWithGpus(1));
  ASSERT_EQ(RunOn(machine, {"allreduce", "--ranks", "3", "-b", "4K", "-e", "256K", "-f", "64", "-n",
                            "3", "-w", "1"}),
            0)
      << errors();
  EXPECT_EQ(Rows(), (std::map<std::string, int>{{"roofline", 2}, {"kernels", 2}, {"gradsync", 2}}));
  for (const nlohmann::json& row : document()) {
    EXPECT_EQ(row["gpus"], 1);
    EXPECT_EQ(row["wrong"], 0) << row;
    EXPECT_GT(row["roofline_ratio_p50"].get<double>(), 0) << row;
    EXPECT_EQ(row["moved_gbps"].is_null(), row["impl"] == "gradsync") << row;
  }
  EXPECT_THAT(output(), HasSubstr("of what copies do"));
  EXPECT_THAT(machine.Violations(), IsEmpty());
  ExpectNothingLeft();
}

TEST_F(CudaBenchTest, ComparesGpusWithNcclInTheTrainers) {
  const FakeMachine machine(MachineWithGpus(2));
  ASSERT_EQ(RunOn(machine, {"allreduce", "--ranks", "2", "--gpus", "2", "-b", "4K", "-e", "4K",
                            "--dtype", "bfloat16", "-n", "3", "-w", "1"}),
            0)
      << errors();
  EXPECT_EQ(Rows(), (std::map<std::string, int>{
                        {"roofline", 1}, {"kernels", 1}, {"gradsync", 1}, {"nccl", 1}}));
  for (const nlohmann::json& row : document()) EXPECT_EQ(row["wrong"], 0) << row;
  EXPECT_THAT(output(), HasSubstr("times as fast as nccl"));
  EXPECT_THAT(machine.Violations(), IsEmpty());
  ExpectNothingLeft();
}

TEST_F(CudaBenchTest, OneTrainerOnOneGpuHasNcclOfWorldSizeOne) {
  const FakeMachine machine(MachineWithGpus(1));
  ASSERT_EQ(RunOn(machine, {"allreduce", "--ranks", "1", "--impl", "gradsync,nccl", "-b", "4K",
                            "-e", "4K", "-n", "2", "-w", "0"}),
            0)
      << errors();
  EXPECT_EQ(Rows(), (std::map<std::string, int>{{"gradsync", 1}, {"nccl", 1}}));
  EXPECT_THAT(machine.Violations(), IsEmpty());
}

// A trainer's call returns without a look at the communicator. If the bench polled the communicator
// until it is ready, NCCL would look slower than it is, and gradsync too good.
TEST_F(CudaBenchTest, NcclInTheTrainersIsCalledAsTrainersCallIt) {
  const FakeMachine machine(MachineWithGpus(2));
  ASSERT_EQ(RunOn(machine, {"allreduce", "--ranks", "2", "--gpus", "2", "--impl", "nccl", "-b",
                            "4K", "-e", "4K", "-n", "2", "-w", "0"}),
            0)
      << errors();
  EXPECT_GT(machine.Calls("ncclAllReduce"), 0u);
  EXPECT_EQ(machine.Calls("ncclCommGetAsyncError"), 0u);
}

TEST_F(CudaBenchTest, HandoffCountsWaitsForTheGpu) {
  const FakeMachine machine(MachineWithGpus(1));
  ASSERT_EQ(RunOn(machine, {"handoff", "-n", "2", "-w", "0"}), 0) << errors();
  const nlohmann::json figures = document();
  EXPECT_EQ(figures["gpus"], 1);
  EXPECT_EQ(figures["host_synchronizations"], 0);
  EXPECT_EQ(figures["buckets"].size(), 4u);
  for (const nlohmann::json& bucket : figures["buckets"]) {
    EXPECT_EQ(bucket["host_synchronizations"], 0);
    for (const char* key : {"mark_ready_us_p50", "enqueued_us_p50", "in_process_us_p50",
                            "ready_to_done_us_p50", "in_process_done_us_p50", "worker_cpu_us"}) {
      EXPECT_GT(bucket[key].get<double>(), 0) << key << " of " << bucket;
    }
    EXPECT_TRUE(bucket["added_us_p50"].is_number()) << bucket;
  }
  EXPECT_THAT(output(), HasSubstr("syncs"));
  EXPECT_THAT(machine.Violations(), IsEmpty());
  ExpectNothingLeft();
}

TEST_F(CudaBenchTest, ErrorsNameWhatIsMissing) {
  const FakeMachine machine(MachineWithGpus(1));
  EXPECT_EQ(RunOn(machine, {"allreduce", "--ranks", "2", "--gpus", "2", "-e", "64K"}), 1);
  EXPECT_THAT(errors(), HasSubstr("--gpus 2: this machine shows 1"));
  EXPECT_EQ(Run({"allreduce", "--device", "cuda", "--cuda_library", "/no/such/libcuda.so.1"}), 1);
  EXPECT_THAT(errors(), HasSubstr("/no/such/libcuda.so.1"));
  EXPECT_EQ(Run({"allreduce", "--device", "cuda", "--ranks", "3", "--gpus", "2"}), 2);
  EXPECT_EQ(Run({"allreduce", "--device", "cuda", "--impl", "gloo"}), 2);
  EXPECT_THAT(errors(), HasSubstr("not of GPUs"));
  EXPECT_EQ(Run({"allreduce", "--impl", "kernels"}), 2);
  ExpectNothingLeft();
}

}  // namespace
}  // namespace gradsync::bench
