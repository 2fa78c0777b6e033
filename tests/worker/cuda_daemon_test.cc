// The daemon on a machine with GPUs. Another process looks for the GPUs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/fakes/control.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Absolute(const std::string& path) {
  char folder[4096];
  return std::string(getcwd(folder, sizeof(folder))) + "/" + path;
}

// Waits until the daemon's log contains `text`, at most for the test's patience. Returns the log.
std::string AwaitLog(const TestDaemon& daemon, const std::string& text) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  std::string log;
  do {
    log = daemon.Log();
  } while (log.find(text) == std::string::npos && std::chrono::steady_clock::now() < end);
  return log;
}

TEST(CudaDaemon, NeverOpensTheDriverItself) {
  const fakes::FakeMachine machine(fakes::MachineWithGpus(2));
  const TestDaemon daemon({"--cuda_library=" + Absolute("tests/fakes/cuda/libcuda.so.1"),
                           "--nccl_library=" + Absolute("tests/fakes/nccl/libnccl.so.2")},
                          {machine.Environment()});
  const std::string log = AwaitLog(daemon, " CUDA ");
  EXPECT_THAT(log, HasSubstr("uuid=" + fakes::GpuUuid(1)));
  EXPECT_THAT(log, HasSubstr("driver=13.0 nccl=2.28.9"));
  EXPECT_GT(machine.Calls("cuInit"), 0u);
  EXPECT_EQ(machine.Calls("cuInit", daemon.pid()), 0u);
  std::ifstream maps("/proc/" + std::to_string(daemon.pid()) + "/maps");
  const std::string mapped{std::istreambuf_iterator<char>(maps), {}};
  EXPECT_THAT(mapped, HasSubstr("gradsyncd"));
  EXPECT_THAT(mapped, Not(HasSubstr("libcuda")));
  EXPECT_THAT(mapped, Not(HasSubstr("libnccl")));
}

TEST(CudaDaemon, SaysWhyThereAreNoGpus) {
  const TestDaemon daemon({"--cuda_library=libcuda-of-no-machine.so.1"});
  EXPECT_THAT(AwaitLog(daemon, "host memory only"), HasSubstr("libcuda-of-no-machine.so.1"));
  const TestDaemon without({"--cuda_library=none"});
  EXPECT_THAT(AwaitLog(without, "host memory only"), HasSubstr("cuda_library is 'none'"));
}

}  // namespace
}  // namespace gradsync::daemon
