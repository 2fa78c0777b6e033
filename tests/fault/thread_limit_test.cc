// A daemon that may have no more threads and processes: requests that need one fail by name, and
// its other jobs go on. Runs outside Bazel's sandbox: inside it root cannot become another user.

#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/thread.h"
#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/child_process.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::fault {
namespace {

// The daemons' user. No other test has it, since the limit counts all tasks of a user. It may write
// to this test's folders, and nothing else.
constexpr char kUser[] = "34567";
const std::vector<std::string>& AsUser() {
  static const auto* const prefix = new std::vector<std::string>{
      "/usr/bin/setpriv", absl::StrCat("--reuid=", kUser), "--clear-groups",
      "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"};
  return *prefix;
}

constexpr char kNoThread[] = "no thread could be started";

// gRPC leaks 40 bytes when the system refuses it a thread.
const std::vector<std::string>& Environment() {
  static const auto* const environment =
      new std::vector<std::string>{"ASAN_OPTIONS=detect_leaks=0"};
  return *environment;
}

// The threads of all processes of the user.
int Tasks() {
  int tasks = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    std::ifstream status(entry.path() / "status");
    bool is_users = false;
    for (std::string line; std::getline(status, line);) {
      if (absl::StartsWith(line, "Uid:")) is_users = absl::StrContains(line, kUser);
      if (is_users && absl::StartsWith(line, "Threads:")) tasks += std::stoi(line.substr(8));
    }
  }
  return tasks;
}

// Sets how many tasks the daemon's user may have when the daemon makes one. Set by that user: root
// in a container may not.
void LimitTasks(const TestDaemon& daemon, int limit) {
  ChildOptions options;
  options.arguments = {"/usr/bin/setpriv",
                       absl::StrCat("--reuid=", kUser),
                       "--clear-groups",
                       "/usr/bin/prlimit",
                       "--pid",
                       std::to_string(daemon.pid()),
                       absl::StrCat("--nproc=", limit, ":")};
  ASSERT_EQ(ChildProcess(options).Wait(kPatienceMs), 0);
}

// Ranks that have not joined yet. Trainers are root, so that they do not count.
Trainers RanksOf(const std::vector<const TestDaemon*>& nodes, const std::string& job) {
  Trainers trainers;
  std::string options;
  if (nodes.front() != nodes.back()) {
    options = "coordinator=" + nodes.front()->Status().peer_address();
  }
  for (std::uint32_t rank = 0; rank < nodes.size(); ++rank) {
    trainers.push_back(std::make_unique<Trainer>(
        nodes[rank]->socket(), rank, static_cast<std::uint32_t>(nodes.size()), job, options));
  }
  return trainers;
}

Trainers Joined(const std::vector<const TestDaemon*>& nodes, const std::string& job) {
  Trainers trainers = RanksOf(nodes, job);
  JoinAll(trainers);
  return trainers;
}

// The ranks join, register a layout and do a step, until one of them fails.
std::vector<Reply> FirstFailures(const Trainers& trainers) {
  for (const char* command : {"", "register buckets=2 count=1000", "step"}) {
    for (const auto& rank : trainers) rank->Send(*command == '\0' ? rank->join() : command);
    std::vector<Reply> failures;
    for (const auto& rank : trainers) {
      if (Reply reply = rank->Receive(); !reply.ok()) failures.push_back(std::move(reply));
    }
    if (!failures.empty()) return failures;
  }
  return {};
}

class ThreadLimitTest : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can start a daemon of another user";
  }
};

// Each user's first connection starts threads.
TEST_F(ThreadLimitTest, ANewUserIsRefused) {
  const TestDaemon daemon({}, Environment(), AsUser());
  const auto trainers = JoinedTrainers(daemon, 2);  // of the daemon's user
  ExpectAll(trainers, "register buckets=2 count=1000");
  LimitTasks(daemon, Tasks() + daemon::kThreadsLeftToGrpc);
  const Descriptor newcomer = ConnectUnix(daemon.socket(), SOCK_STREAM);
  ASSERT_GE(newcomer.get(), 0);
  ASSERT_TRUE(AwaitReadable(newcomer.get(), kPatienceMs));
  char byte = 0;
  EXPECT_EQ(read(newcomer.get(), &byte, 1), 0) << "the daemon has closed the connection";
  EXPECT_TRUE(absl::StrContains(daemon.Log(), kNoThread)) << daemon.Log();
  ExpectAll(trainers, "step times=3");
  LimitTasks(daemon, 4096);
  EXPECT_EQ(daemon.Status().jobs_size(), 1) << "root may ask again";
}

// An engine between nodes has threads on both nodes, and a process on each. The daemon may have a
// few tasks more in each round, so that each of them is the first one that cannot be started. It
// always leaves some to gRPC, without which no connection is sure to go on.
TEST_F(ThreadLimitTest, AJobBetweenNodesFailsByNameAndNothingElse) {
  // The coordinator is limited, or the other node.
  for (const bool coordinator : {true, false}) {
    const TestDaemon alpha({"--peer_listen=127.0.0.1:0", "--node_name=alpha"}, Environment(),
                           AsUser());
    const TestDaemon beta({"--peer_listen=127.0.0.2:0", "--node_name=beta"}, Environment(),
                          AsUser());
    const TestDaemon& limited = coordinator ? alpha : beta;
    const std::string named = absl::StrCat("node ", coordinator ? "alpha" : "beta", ": ");
    const auto innocent = Joined({&limited, &limited}, "innocent");
    ExpectAll(innocent, "register buckets=2 count=1000");
    // Both daemons have served a job before, and have the threads that this takes.
    Joined({&alpha, &beta}, "first");
    int out_of_threads = 0;
    for (int more = 0; more < 16; ++more) {
      LimitTasks(limited, Tasks() + daemon::kThreadsLeftToGrpc + more);
      const auto trainers = RanksOf({&alpha, &beta}, absl::StrCat("job", more));
      std::string failed;
      for (const Reply& reply : FirstFailures(trainers)) {
        EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
        EXPECT_TRUE(reply.reason == "ENGINE_FAILED" || reply.reason == "ENGINE_LOST" ||
                    reply.reason == "ENGINE_PEER_LOST")
            << reply;
        failed = reply.message;
      }
      std::cout << more << " more tasks: " << (failed.empty() ? "no error" : failed) << std::endl;
      if (absl::StrContains(failed, kNoThread)) {
        ++out_of_threads;
        EXPECT_TRUE(absl::StrContains(failed, absl::StrCat(named, kNoThread))) << failed;
      }
      ExpectAll(innocent, "step times=3");
    }
    EXPECT_GT(out_of_threads, 3);
    LimitTasks(limited, 4096);
    // For 100 ms after a refusal the daemon still says no.
    Trainers again;
    std::vector<Reply> failures;
    const std::uint64_t give_up_ns = NowNs() + std::uint64_t{kPatienceMs} * 1'000'000;
    for (int attempt = 0; again.empty() || (!failures.empty() && NowNs() < give_up_ns); ++attempt) {
      again = RanksOf({&alpha, &beta}, absl::StrCat("again", attempt));
      failures = FirstFailures(again);
    }
    ASSERT_TRUE(failures.empty()) << failures.front();
    ExpectAll(again, "step times=3");
    ExpectAll(innocent, "step times=3");
  }
}

}  // namespace
}  // namespace gradsync::fault
