// gradsync-bench as a process of a test, with its files in a folder of its own.

#ifndef TESTS_BENCH_BENCH_FIXTURE_H_
#define TESTS_BENCH_BENCH_FIXTURE_H_

#include <fcntl.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace gradsync::bench {

inline constexpr char kBench[] = "tools/bench/gradsync-bench";

inline std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

class BenchTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/tmp/bench-test-XXXXXX";  // short: sockets lie below it
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    // Orphans become this process' children, which is how the tests see them.
    ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // Starts the bench with its files in a folder of its own; its stderr goes to `errors`, if given.
  pid_t Start(const std::vector<std::string>& arguments, int errors = -1) {
    std::filesystem::create_directories(temporary());
    const pid_t pid = fork();
    if (pid != 0) return pid;
    setenv("TMPDIR", temporary().c_str(), 1);
    const int output = open(out().c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(output, STDOUT_FILENO);
    dup2(errors >= 0 ? errors : open(err().c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600),
         STDERR_FILENO);
    std::vector<char*> argv = {const_cast<char*>(kBench)};
    for (const std::string& argument : arguments) {
      argv.push_back(const_cast<char*>(argument.c_str()));
    }
    argv.push_back(nullptr);
    execv(kBench, argv.data());
    _exit(127);
  }

  // Exit code; the number of its signal + 1000 if it was killed.
  static int Wait(pid_t pid) {
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

  int Run(const std::vector<std::string>& arguments) { return Wait(Start(arguments)); }

  // Returns when every process that the bench has started has ended; the test's time limit is for
  // one that stays.
  static void AwaitOrphans() {
    while (waitpid(-1, nullptr, 0) > 0 || errno == EINTR) {
    }
    EXPECT_EQ(errno, ECHILD);
  }

  void ExpectNothingLeft() {
    AwaitOrphans();
    EXPECT_TRUE(std::filesystem::is_empty(temporary()));
  }

  std::string temporary() const { return directory_ + "/t"; }
  std::string out() const { return directory_ + "/out"; }
  std::string err() const { return directory_ + "/err"; }
  std::string json() const { return directory_ + "/json"; }
  std::string output() const { return Contents(out()); }
  std::string errors() const { return Contents(err()); }
  nlohmann::json document() const { return nlohmann::json::parse(Contents(json())); }

  std::string directory_;
};

}  // namespace gradsync::bench

#endif  // TESTS_BENCH_BENCH_FIXTURE_H_
