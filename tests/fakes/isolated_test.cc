#include "tests/fakes/isolated_test.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "tests/fakes/machine/real_gpus.h"
#include "tests/kit/deadline.h"

namespace gradsync::fakes {
namespace {

constexpr char kRoleFlag[] = "--role=";
constexpr char kIsolatedVariable[] = "GRADSYNC_FAKE_CUDA_ISOLATED";
std::map<std::string, RoleFunction*>& Roles() {
  static auto* const roles = new std::map<std::string, RoleFunction*>;
  return *roles;
}

std::string ThisProgram() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "";
}

}  // namespace

bool Isolated() { return std::getenv(kIsolatedVariable) != nullptr; }

bool Succeeds(ChildProcess& process) {
  const std::optional<int> status = process.Wait(kPatienceMs);
  if (!status.has_value()) std::fprintf(stderr, "has not ended in time\n");
  return status.has_value() && WIFEXITED(*status) && WEXITSTATUS(*status) == 0;
}

void RunIsolated(const std::string& name, const MachineDescription& machine) {
  const std::size_t gpus = RealGpus().size();
  if (gpus > 0 && machine.gpus.size() > gpus && !machine.may_be_one) {
    GTEST_SKIP() << "this machine has fewer than " << machine.gpus.size() << " GPUs";
  }
  const auto plain = MachineWithGpus(static_cast<int>(machine.gpus.size()));
  if (gpus > 0 && FormatMachine(machine) != FormatMachine(plain)) {
    GTEST_SKIP() << "the test describes GPUs of another kind than this machine has";
  }
  std::optional<FakeMachine> made;
  if (gpus == 0) made.emplace(machine);
  // Only the outer process reports results and takes part in sharding.
  unsetenv("XML_OUTPUT_FILE");
  for (const char* shard : {"TEST_TOTAL_SHARDS", "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) {
    unsetenv(shard);
  }
  unsetenv("TEST_PREMATURE_EXIT_FILE");
  ChildOptions options;
  options.arguments = {ThisProgram(), "--gtest_filter=" + name, "--gtest_brief=1"};
  options.environment = {std::string(kIsolatedVariable) + "=1"};
  if (made.has_value()) options.environment.push_back(made->Environment());
  if (gpus > 0 && machine.may_be_one) {
    std::vector<std::string> uuids;
    for (std::size_t gpu = 0; gpu < machine.gpus.size(); ++gpu) {
      uuids.push_back(RealGpus()[gpu % gpus]);
    }
    options.environment.push_back(RealGpusVariable(uuids));
  }
  ChildProcess process(options);
  const std::optional<int> status = process.Wait(kPatienceMs);
  ASSERT_TRUE(status.has_value()) << name << " has not ended in time";
  if (gpus > 0 && WIFEXITED(*status) && WEXITSTATUS(*status) == kNeedsFakes) {
    GTEST_SKIP() << "passed up to the point that needs the fakes";
  }
  EXPECT_TRUE(WIFEXITED(*status) && WEXITSTATUS(*status) == 0) << name;
}

bool RegisterRole(const std::string& name, RoleFunction* role) {
  return Roles().emplace(name, role).second;
}

std::unique_ptr<ChildProcess> StartRole(const std::string& name, std::vector<int> passed,
                                        std::vector<std::string> environment) {
  ChildOptions options;
  options.arguments = {ThisProgram(), kRoleFlag + name};
  options.environment = std::move(environment);
  options.passed = std::move(passed);
  return std::make_unique<ChildProcess>(options);
}

}  // namespace gradsync::fakes

int main(int argc, char** argv) {
  using gradsync::fakes::kRoleFlag;
  constexpr std::size_t kFlagLength = sizeof(kRoleFlag) - 1;
  if (argc > 1 && std::strncmp(argv[1], kRoleFlag, kFlagLength) == 0) {
    const auto role = gradsync::fakes::Roles().find(argv[1] + kFlagLength);
    return role == gradsync::fakes::Roles().end() ? 127 : role->second();
  }
  testing::InitGoogleTest(&argc, argv);
  // Failures up to this point still fail the test.
  std::at_quick_exit([] {
    if (testing::Test::HasFailure()) std::_Exit(1);
  });
  return RUN_ALL_TESTS();
}
