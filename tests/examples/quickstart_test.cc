// The quick start as a user runs it: its figures, and that nothing stays behind however it ends.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/examples/child_group.h"

namespace gradsync::examples {
namespace {

using EventKind = ChildGroup::EventKind;
using ::testing::HasSubstr;

class QuickstartTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Bazel's own TEST_TMPDIR is too long for a socket's address.
    char path[] = "/tmp/quickstart-test-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    directory_ = path;
    absl::StatusOr<std::unique_ptr<ChildGroup>> group = ChildGroup::Create();
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }

  void TearDown() override {
    group_.reset();
    std::filesystem::remove_all(directory_);
  }

  void Start(const std::vector<std::string>& flags) {
    ChildGroup::Command command;
    command.arguments = {"client/examples/digits_quickstart"};
    command.arguments.insert(command.arguments.end(), flags.begin(), flags.end());
    command.environment = {"TMPDIR=" + directory_};
    const absl::StatusOr<ChildGroup::Id> id = group_->Start(command);
    ASSERT_TRUE(id.ok()) << id.status();
    quickstart_ = *id;
  }

  // Returns when a line of the output contains `text`, or the program has ended.
  void AwaitLine(const std::string& text) {
    Pump([&](const ChildGroup::Event& event) {
      return event.kind == EventKind::kOutput && absl::StrContains(event.line, text);
    });
    ASSERT_FALSE(ended_) << "ended before it said '" << text << "'\n" << output_ << errors_;
  }

  // Returns the exit code.
  int AwaitEnd() {
    Pump([](const ChildGroup::Event&) { return false; });
    EXPECT_TRUE(WIFEXITED(wait_status_)) << DescribeExit(wait_status_);
    return WEXITSTATUS(wait_status_);
  }

  void ExpectNothingLeft() {
    for (const auto& [name, pid] : pids_) {
      EXPECT_TRUE(kill(pid, 0) != 0 && errno == ESRCH) << name << " is still there";
    }
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      ADD_FAILURE() << entry.path() << " is still there";
    }
  }

  nlohmann::json ReadJson(const std::string& path) {
    std::ifstream file(path);
    return nlohmann::json::parse(file, nullptr, false);
  }

  std::string directory_;
  std::unique_ptr<ChildGroup> group_;
  ChildGroup::Id quickstart_ = 0;
  std::map<std::string, pid_t> pids_;  // "gradsyncd", "rank 0", ...
  std::string output_;
  std::string errors_;
  bool ended_ = false;
  int wait_status_ = 0;

 private:
  void Pump(const std::function<bool(const ChildGroup::Event&)>& done) {
    while (!ended_) {
      const absl::StatusOr<ChildGroup::Event> event = group_->Next(absl::Now() + absl::Minutes(2));
      ASSERT_TRUE(event.ok()) << event.status();
      ASSERT_NE(event->kind, EventKind::kDeadline) << output_ << errors_;
      if (event->kind == EventKind::kOutput) {
        absl::StrAppend(&output_, event->line, "\n");
        char name[16];
        int rank = 0;
        int pid = 0;
        int node = 0;
        if (sscanf(event->line.c_str(), " rank %d pid %d", &rank, &pid) == 2) {
          pids_[absl::StrCat("rank ", rank)] = pid;
        } else if (sscanf(event->line.c_str(), " %15s pid %d %*s on node %d", name, &pid, &node) ==
                   3) {
          pids_[absl::StrCat(name, " of node ", node)] = pid;
        } else if (sscanf(event->line.c_str(), " %15s pid %d", name, &pid) == 2) {
          pids_[name] = pid;
        }
      } else if (event->kind == EventKind::kError) {
        absl::StrAppend(&errors_, event->line, "\n");
      } else if (event->kind == EventKind::kExit) {
        ended_ = true;
        wait_status_ = event->wait_status;
      }
      if (done(*event)) return;
    }
  }
};

class QuickstartRanksTest : public QuickstartTest, public ::testing::WithParamInterface<int> {};

TEST_P(QuickstartRanksTest, LearnsWhatOneProcessLearns) {
  const int ranks = GetParam();
  const std::string path = absl::StrCat(getenv("TEST_TMPDIR"), "/figures.json");
  Start({"--ranks", absl::StrCat(ranks), "--json", path});
  EXPECT_EQ(AwaitEnd(), 0) << output_ << errors_;
  EXPECT_EQ(errors_, "");
  ExpectNothingLeft();
  EXPECT_EQ(pids_.size(), ranks + 1u);

  const nlohmann::json figures = ReadJson(path);
  ASSERT_TRUE(figures.is_object());
  EXPECT_EQ(figures["ranks"], ranks);
  EXPECT_GE(figures["test_accuracy"], 96);
  EXPECT_EQ(figures["max_difference_sharded"], 0);
  EXPECT_LE(figures["max_difference_whole"], 1e-5);
  EXPECT_EQ(figures["steps"], 240);
  // At least every parameter in every step, at most some padding on top.
  EXPECT_GE(figures["bytes_reduced"], 240 * 396'490 * 4);
  EXPECT_LE(figures["bytes_reduced"], 240 * 397'490 * 4);
  EXPECT_GT(figures["reduce_gbps"], 0);
  EXPECT_GE(figures["overlap_percent"], 0);
  EXPECT_LE(figures["overlap_percent"], 100);

  // A line per rank and per bucket, of which there are at least 4.
  EXPECT_THAT(output_, HasSubstr("One step as it happened"));
  EXPECT_THAT(output_, HasSubstr(absl::StrCat("  rank ", ranks - 1, "    computes")));
  EXPECT_THAT(output_, HasSubstr("  bucket 3  fc2 "));
  EXPECT_THAT(output_, HasSubstr("grpcurl -plaintext -unix"));
}

INSTANTIATE_TEST_SUITE_P(Ranks, QuickstartRanksTest, ::testing::Values(2, 3));

class QuickstartNodesTest : public QuickstartTest {};

TEST_F(QuickstartNodesTest, LearnsWhatOneProcessLearns) {
  const std::string path = absl::StrCat(getenv("TEST_TMPDIR"), "/nodes.json");
  Start({"--nodes=2", "--ranks=2", "--json", path});
  EXPECT_EQ(AwaitEnd(), 0) << output_ << errors_;
  EXPECT_EQ(errors_, "");
  ExpectNothingLeft();
  EXPECT_EQ(pids_.size(), 6u);
  printf("%s", output_.c_str());

  const nlohmann::json figures = ReadJson(path);
  ASSERT_TRUE(figures.is_object());
  EXPECT_EQ(figures["nodes"], 2);
  EXPECT_EQ(figures["ranks"], 4);
  EXPECT_GE(figures["test_accuracy"], 96);
  EXPECT_EQ(figures["max_difference_sharded"], 0);
  EXPECT_LE(figures["max_difference_whole"], 1e-5);
  EXPECT_EQ(figures["steps"], 240);
  EXPECT_GT(figures["reduce_gbps"], 0);

  EXPECT_THAT(output_, HasSubstr("  network "));
  EXPECT_THAT(output_, HasSubstr("  rank 1    on node 0 "));
  EXPECT_THAT(output_, HasSubstr("  rank 2    on node 1 "));
}

TEST_F(QuickstartNodesTest, NamesADaemonThatWasKilled) {
  Start({"--nodes=3", "--ranks=1", "--steps=1000000"});
  AwaitLine("step ");
  const pid_t killed = pids_["gradsyncd of node 2"];
  ASSERT_EQ(kill(killed, SIGKILL), 0);
  EXPECT_EQ(AwaitEnd(), 1);
  EXPECT_THAT(errors_, HasSubstr(absl::StrCat("quickstart: gradsyncd of node 2 (pid ", killed,
                                              ") was killed by signal 9 (Killed)")));
  // The others were told by their daemons.
  EXPECT_THAT(errors_, HasSubstr("rank 0 (pid "));
  EXPECT_THAT(errors_, HasSubstr("rank 1 (pid "));
  EXPECT_THAT(errors_, HasSubstr("node-2"));
  ExpectNothingLeft();
}

TEST_F(QuickstartTest, AnUntrainedModelFails) {
  const std::string path = absl::StrCat(getenv("TEST_TMPDIR"), "/untrained.json");
  Start({"--steps=1", "--json=" + path});
  EXPECT_EQ(AwaitEnd(), 1);
  EXPECT_THAT(errors_, HasSubstr("the test accuracy is "));
  ExpectNothingLeft();
  const nlohmann::json figures = ReadJson(path);
  ASSERT_TRUE(figures.is_object());
  EXPECT_EQ(figures["max_difference_sharded"], 0);
}

TEST_F(QuickstartTest, NamesATrainerThatWasKilled) {
  Start({"--ranks=3", "--steps=1000000"});
  AwaitLine("step ");
  ASSERT_EQ(kill(pids_["rank 1"], SIGKILL), 0);
  EXPECT_EQ(AwaitEnd(), 1);
  EXPECT_THAT(errors_, HasSubstr(absl::StrCat("quickstart: rank 1 (pid ", pids_["rank 1"],
                                              ") was killed by signal 9 (Killed)")));
  // The others were told by the daemon.
  EXPECT_THAT(errors_, HasSubstr("rank 0 (pid "));
  EXPECT_THAT(errors_, HasSubstr("rank 2 (pid "));
  EXPECT_THAT(errors_, HasSubstr("ABORTED: step "));
  EXPECT_THAT(errors_, HasSubstr("rank 1"));
  ExpectNothingLeft();
}

TEST_F(QuickstartTest, NamesADaemonThatWasKilled) {
  Start({"--steps=1000000"});
  AwaitLine("step ");
  ASSERT_EQ(kill(pids_["gradsyncd"], SIGKILL), 0);
  EXPECT_EQ(AwaitEnd(), 1);
  EXPECT_THAT(errors_, HasSubstr(absl::StrCat("quickstart: gradsyncd (pid ", pids_["gradsyncd"],
                                              ") was killed by signal 9 (Killed)")));
  EXPECT_THAT(errors_, HasSubstr("UNAVAILABLE: step "));
  ExpectNothingLeft();
}

class QuickstartSignalTest : public QuickstartTest, public ::testing::WithParamInterface<int> {};

TEST_P(QuickstartSignalTest, LeavesNothing) {
  Start({"--steps=1000000"});
  AwaitLine("step ");
  group_->Kill(quickstart_, GetParam());
  EXPECT_EQ(AwaitEnd(), 128 + GetParam());
  EXPECT_THAT(errors_, HasSubstr("everything is cleaned up"));
  ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(Signals, QuickstartSignalTest, ::testing::Values(SIGINT, SIGTERM));

TEST_F(QuickstartTest, KeepsTheDaemonOnRequest) {
  Start({"--keep", "--steps=80"});
  AwaitLine("Press Enter");
  EXPECT_EQ(kill(pids_["gradsyncd"], 0), 0);
  EXPECT_EQ(kill(pids_["rank 0"], 0), 0);
  EXPECT_THAT(output_, HasSubstr(absl::StrCat("status --socket ", directory_, "/gradsync-")));
  group_->Kill(quickstart_, SIGINT);
  EXPECT_EQ(AwaitEnd(), 0) << errors_;
  ExpectNothingLeft();
}

TEST_F(QuickstartTest, SaysWhyTheDaemonDidNotStart) {
  Start({"--daemon=/no/such/gradsyncd"});
  EXPECT_EQ(AwaitEnd(), 1);
  EXPECT_EQ(errors_,
            "\nquickstart: gradsyncd: cannot run /no/such/gradsyncd: No such file or directory\n");
  ExpectNothingLeft();
}

TEST_F(QuickstartTest, SaysWhatTheDaemonSaidBeforeItEnded) {
  Start({"--daemon=/bin/cat"});  // which does not know --socket
  EXPECT_EQ(AwaitEnd(), 1);
  EXPECT_THAT(errors_, HasSubstr("exited with code 1\n"));
  EXPECT_THAT(errors_, HasSubstr("unrecognized option '--socket"));
  ExpectNothingLeft();
}

TEST_F(QuickstartTest, UsageEndsWithTwo) {
  Start({"--ranks=9"});
  EXPECT_EQ(AwaitEnd(), 2);
  EXPECT_EQ(errors_, "quickstart: --ranks takes a number from 1 to 8, not '9' (see --help)\n");
}

TEST_F(QuickstartTest, TooManyRanksOnAllNodes) {
  Start({"--nodes=4", "--ranks=3"});
  EXPECT_EQ(AwaitEnd(), 2);
  EXPECT_EQ(errors_, "quickstart: --nodes times --ranks is 12, more than 8 (see --help)\n");
}

TEST_F(QuickstartTest, Helps) {
  Start({"--help"});
  EXPECT_EQ(AwaitEnd(), 0);
  EXPECT_THAT(output_, HasSubstr("--ranks N"));
}

}  // namespace
}  // namespace gradsync::examples
