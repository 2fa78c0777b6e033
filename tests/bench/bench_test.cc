// gradsync-bench from outside: what it prints, writes and returns, and what it leaves behind.

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/bench/bench_fixture.h"

namespace gradsync::bench {
namespace {

using ::testing::HasSubstr;

TEST_F(BenchTest, EveryImplementationAverages) {
  ASSERT_EQ(Run({"allreduce", "-b", "4K", "-e", "1M", "-f", "16", "-n", "3", "-w", "1", "--json",
                 json()}),
            0)
      << errors();
  std::map<std::string, int> rows;
  for (const nlohmann::json& row : document()) {
    ++rows[row["impl"]];
    EXPECT_EQ(row.size(), 15u);
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_EQ(row["dtype"], "float32");
    EXPECT_EQ(row["wrong"], 0) << row;
    for (const char* key : {"time_us_p50", "time_us_p99", "algbw_gbps", "busbw_gbps", "cpu_seconds",
                            "roofline_ratio_p50", "roofline_ratio_p10"}) {
      EXPECT_GT(row[key].get<double>(), 0) << key << " of " << row;
    }
  }
  // 4K, 64K, 1M; Open MPI where it is installed.
  EXPECT_EQ(rows["roofline"], 3);
  EXPECT_EQ(rows["gradsync"], 3);
  EXPECT_EQ(rows["gloo"], 3);
  EXPECT_EQ(rows["openmpi"], absl::StrContains(output(), "without openmpi") ? 0 : 3);
  for (const char* head : {"size", "count", "type", "impl", "time p50", "algbw", "busbw", "#wrong",
                           "ratio", "cores", "times as fast as gloo"}) {
    EXPECT_THAT(output(), HasSubstr(head));
  }
  ExpectNothingLeft();
}

TEST_F(BenchTest, EveryTypeAveragesOverAnOddNumberOfBusyRanks) {
  for (const char* dtype : {"float64", "float16", "bfloat16"}) {
    ASSERT_EQ(Run({"allreduce", "-b", "60000", "-e", "60000", "-n", "2", "-w", "1", "--ranks", "3",
                   "--dtype", dtype, "--busy", "--json", json()}),
              0)
        << errors();
    for (const nlohmann::json& row : document()) {
      EXPECT_EQ(row["dtype"], dtype);
      EXPECT_EQ(row["ranks"], 3);
      EXPECT_EQ(row["wrong"], 0) << row;
    }
  }
  ExpectNothingLeft();
}

// On loopback addresses where namespaces cannot be made, which the bench says.
TEST_F(BenchTest, NodesAverageOverTheirLinks) {
  ASSERT_EQ(Run({"allreduce", "--nodes", "2", "--rate", "1gbit", "-b", "64K", "-e", "64K", "-n",
                 "3", "-w", "1", "--json", json()}),
            0)
      << errors();
  std::map<std::string, int> rows;
  const bool limited = absl::StrContains(output(), "links of 1gbit");
  for (const nlohmann::json& row : document()) {
    ++rows[row["impl"]];
    EXPECT_EQ(row["ranks"], 4);
    EXPECT_EQ(row["nodes"], 2);
    EXPECT_EQ(row["wrong"], 0) << row;
    EXPECT_TRUE(row["roofline_ratio_p50"].is_null());
    EXPECT_EQ(row["wire_utilisation"].is_number(), limited) << row;
    EXPECT_EQ(row["rate"], limited ? nlohmann::json("1gbit") : nlohmann::json()) << row;
  }
  EXPECT_EQ(rows, (std::map<std::string, int>{{"gradsync", 1}, {"gloo", 1}}));
  EXPECT_THAT(output(), HasSubstr(limited ? "2 network namespaces" : "--rate is not kept"));
  EXPECT_THAT(output(), HasSubstr("times as fast as gloo"));
  ExpectNothingLeft();
}

TEST_F(BenchTest, HandoffMeasuresTheWayThroughTheCoordinator) {
  ASSERT_EQ(
      Run({"handoff", "--nodes", "3", "--ranks", "1", "-n", "3", "-w", "1", "--json", json()}), 0)
      << errors();
  EXPECT_EQ(document()["ranks"], 3);
  EXPECT_EQ(document()["nodes"], 3);
  EXPECT_GT(document()["ready_to_done_us_p50"].get<double>(), 0);
  ExpectNothingLeft();
}

TEST_F(BenchTest, WrongElementsAreCountedAndFail) {
  EXPECT_EQ(Run({"allreduce", "-b", "1M", "-e", "1M", "-n", "3", "-w", "2", "--impl",
                 "roofline,faulty", "--json", json()}),
            1);
  EXPECT_THAT(errors(), HasSubstr("10 elements were wrong"));
  EXPECT_EQ(document()[0]["impl"], "roofline");
  EXPECT_EQ(document()[0]["wrong"], 0);
  EXPECT_EQ(document()[1]["impl"], "faulty");
  EXPECT_EQ(document()[1]["wrong"], 2 * (3 + 2)) << "one per rank and iteration";
}

TEST_F(BenchTest, HandoffMeasuresTheEmptyBucket) {
  ASSERT_EQ(Run({"handoff", "-n", "5", "-w", "1", "--json", json()}), 0) << errors();
  const nlohmann::json figures = document();
  for (const char* key :
       {"mark_ready_us_p50", "mark_ready_us_p99", "ready_to_done_us_p50", "ready_to_done_us_p99"}) {
    EXPECT_GT(figures[key].get<double>(), 0) << key;
    for (const nlohmann::json& bucket : figures["buckets"]) {
      EXPECT_GT(bucket[key].get<double>(), 0) << key << " of " << bucket;
    }
  }
  EXPECT_EQ(figures["buckets"].size(), 5u);
  EXPECT_EQ(figures["buckets"][0]["bytes"], 0);
  EXPECT_THAT(output(), HasSubstr("MarkReady"));
  ExpectNothingLeft();
}

TEST_F(BenchTest, UsageErrorsExitWith2) {
  EXPECT_EQ(Run({}), 2);
  EXPECT_EQ(Run({"allreduce", "--no-such-flag"}), 2);
  EXPECT_THAT(errors(), HasSubstr("--no-such-flag"));
  EXPECT_EQ(Run({"allreduce", "--ranks", "two"}), 2);
  EXPECT_EQ(Run({"--help"}), 0);
  EXPECT_THAT(output(), HasSubstr("allreduce"));
  EXPECT_EQ(Run({"allreduce", "--help"}), 0);
  EXPECT_THAT(output(), HasSubstr("roofline"));
}

TEST_F(BenchTest, WrongPathsAreNamed) {
  EXPECT_EQ(Run({"handoff", "--json", "/no/such/folder/x.json"}), 2);
  EXPECT_THAT(errors(), HasSubstr("/no/such/folder/x.json"));
  EXPECT_EQ(Run({"handoff", "--daemon", "/no/such/daemon"}), 2);
  EXPECT_THAT(errors(), HasSubstr("/no/such/daemon"));
  ExpectNothingLeft();
}

TEST_F(BenchTest, FailuresExitWith1AndSayWhy) {
  EXPECT_EQ(Run({"handoff", "--daemon", "/bin/false"}), 1);
  EXPECT_THAT(errors(), HasSubstr("gradsyncd (pid "));
  ExpectNothingLeft();
}

// Interrupted while everybody is at work, or killed: either way nobody lives on.
class BenchEndTest : public BenchTest {
 protected:
  pid_t StartAndAwaitWork() {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t pid = Start({"allreduce", "-b", "1M", "-e", "1M", "-n", "1000000"}, ends[1]);
    close(ends[1]);
    std::string text;
    char byte = 0;
    while (!absl::StrContains(text, "1M: ") && read(ends[0], &byte, 1) == 1) text += byte;
    EXPECT_THAT(text, HasSubstr("1M: ")) << "it never began";
    errors_ = ends[0];
    return pid;
  }
  ~BenchEndTest() override { close(errors_); }

  int errors_ = -1;
};

TEST_F(BenchEndTest, CtrlCLeavesNothingBehind) {
  const pid_t pid = StartAndAwaitWork();
  ASSERT_EQ(kill(pid, SIGINT), 0);
  EXPECT_EQ(Wait(pid), 128 + SIGINT);
  ExpectNothingLeft();
}

TEST_F(BenchEndTest, KilledBenchTakesItsProcessesAlong) {
  const pid_t pid = StartAndAwaitWork();
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  EXPECT_EQ(Wait(pid), 1000 + SIGKILL);
  AwaitOrphans();
}

}  // namespace
}  // namespace gradsync::bench
