// gradsync-bench as a process of a test, with its files in a folder of its own.

#ifndef TESTS_BENCH_BENCH_FIXTURE_H_
#define TESTS_BENCH_BENCH_FIXTURE_H_

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/kit/child_process.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::bench {

inline constexpr char kBench[] = "tools/bench/gradsync-bench";

inline std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

class BenchTest : public testing::Test {
 protected:
  void SetUp() override {
    // Orphans become this process's children, so the tests see them.
    ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  }

  // Runs the bench with its files in a folder of its own. Returns its exit code, or 1000 + the
  // number of the signal that ended it. If it hangs, the test's time limit ends it.
  int Run(const std::vector<std::string>& arguments) {
    std::filesystem::create_directories(temporary());
    constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    const Descriptor output(open(out().c_str(), kFlags, 0600));
    const Descriptor error(open(err().c_str(), kFlags, 0600));
    ChildOptions options;
    options.arguments = {kBench};
    options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
    options.environment = {"TMPDIR=" + temporary()};
    options.output = output.get();
    options.error = error.get();
    const int status = ChildProcess(options).Wait(-1).value_or(-1);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

  // Returns when every process that the bench has started has ended. If one stays, the test's time
  // limit ends the test.
  static void AwaitOrphans() {
    while (waitpid(-1, nullptr, 0) > 0 || errno == EINTR) {
    }
    EXPECT_EQ(errno, ECHILD);
  }

  void ExpectNothingLeft() {
    AwaitOrphans();
    EXPECT_TRUE(std::filesystem::is_empty(temporary()));
  }

  std::string temporary() const { return directory_.File("t"); }
  std::string out() const { return directory_.File("out"); }
  std::string err() const { return directory_.File("err"); }
  std::string json() const { return directory_.File("json"); }
  std::string output() const { return Contents(out()); }
  std::string errors() const { return Contents(err()); }
  nlohmann::json document() const { return nlohmann::json::parse(Contents(json())); }

  const TemporaryDirectory directory_;
};

}  // namespace gradsync::bench

#endif  // TESTS_BENCH_BENCH_FIXTURE_H_
