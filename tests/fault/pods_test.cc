// Two pods with one user id: each has quotas of its own, and neither sees the other's jobs. The
// pods are cgroups with the names that a kubelet gives. Runs outside Bazel's sandbox, where cgroups
// can be made.

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/fault/fake_coordinator.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::fault {
namespace {

constexpr char kPodA[] = "kubepods/burstable/pod6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60";
constexpr char kPodB[] = "kubepods/burstable/pod0a4d5e7c-1111-4222-9333-abcdefabcdef";
constexpr char kTextOfPodB[] = "user 0 in pod 0a4d5e7c-1111-4222-9333-abcdefabcdef";

class PodsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can make cgroups";
    for (const char* root : {"/sys/fs/cgroup/unified", "/sys/fs/cgroup"}) {
      if (access(absl::StrCat(root, "/cgroup.procs").c_str(), W_OK) == 0 && root_.empty()) {
        root_ = root;
      }
    }
    if (root_.empty()) GTEST_SKIP() << "no cgroups of version 2 that can be changed";
    if (access(Path("kubepods").c_str(), F_OK) == 0) GTEST_SKIP() << "a kubelet runs here";
    for (const char* name : {"kubepods", "kubepods/burstable", kPodA, kPodB}) {
      if (!Make(name)) GTEST_SKIP() << "mkdir " << Path(name) << ": " << std::strerror(errno);
    }
  }
  void TearDown() override {
    for (auto name = made_.rbegin(); name != made_.rend(); ++name) {
      EXPECT_EQ(rmdir(Path(*name).c_str()), 0) << *name;
    }
  }
  std::string Path(const std::string& name) const { return absl::StrCat(root_, "/", name); }
  bool Make(const std::string& name) {
    if (mkdir(Path(name).c_str(), 0755) != 0) return false;
    made_.push_back(name);
    return true;
  }
  // A rank in this cgroup, of a job of one unless the last argument says more.
  std::unique_ptr<Trainer> Rank(const TestDaemon& daemon, const std::string& cgroup,
                                const std::string& job, const std::string& options = "",
                                std::uint32_t rank = 0, std::uint32_t world = 1) const {
    const std::vector<std::string> enter = {
        "/bin/sh", "-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"", Path(cgroup)};
    return std::make_unique<Trainer>(daemon.socket(), rank, world, job, options, enter);
  }

 private:
  std::string root_;
  std::vector<std::string> made_;
};

TEST_F(PodsTest, EachPodOfAUserHasItsQuotas) {
  const TestDaemon daemon({"--quota_sessions_per_user=1"});
  const auto a = Rank(daemon, kPodA, "a");
  const auto b = Rank(daemon, kPodB, "b");
  ASSERT_TRUE(a->Join().ok());
  ASSERT_TRUE(b->Join().ok());
  EXPECT_TRUE(a->Do("register buckets=2 count=100").ok());
  EXPECT_TRUE(a->Do("step times=2").ok());
  for (const char* options : {"", "token=another"}) {
    const Reply refused = Rank(daemon, kPodB, "c", options)->Join();
    EXPECT_EQ(refused.code, "RESOURCE_EXHAUSTED") << refused;
    EXPECT_NE(refused.message.find(kTextOfPodB), std::string::npos) << refused;
    EXPECT_TRUE(a->Do("step times=2").ok());
  }
}

// A coordinator that a rank of pod B has chosen asks for engines without end. Then a job that
// another rank of that pod begins gets none, sooner or later; those of pod A always do.
TEST_F(PodsTest, EachPodOfAUserHasItsEngines) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "threads start so slowly that engines end before four are there";
#endif
  const TestDaemon alpha(TwoNodes::Flags("127.0.0.1", "alpha", {"--quota_jobs_per_user=1"}));
  const TestDaemon beta(TwoNodes::Flags("127.0.0.2", "beta"));
  std::atomic<bool> full{false};
  const FakeCoordinator fake(FakeCoordinator::AskForEngines(&full));
  const auto greedy = Rank(alpha, kPodB, "greedy", "coordinator=" + fake.address(), 1, 2);
  greedy->Begin(greedy->join());
  ASSERT_TRUE(alpha.AwaitStatus([&](const auto&) { return full.load(); }));

  const std::string coordinator = "coordinator=" + alpha.Status().peer_address();
  // The first error of a job whose rank 0 is in this pod; "" if there is none.
  const auto first_error = [&](const char* pod, const std::string& name) -> std::string {
    Trainers job;
    job.push_back(Rank(alpha, pod, name, coordinator, 0, 2));
    job.push_back(std::make_unique<Trainer>(beta, 1, 2, name, coordinator));
    for (const auto& rank : job) {
      if (const Reply reply = rank->Join(); !reply.ok()) return reply.message;
    }
    for (const char* command : {"register buckets=2 count=1000", "step times=2"}) {
      for (const Reply& reply : DoAll(job, command)) {
        if (!reply.ok()) return reply.message;
      }
    }
    return "";
  };
  // The engines of the greedy job come and go. Pod A asks for fewer than its quota, because the
  // engines of its ended jobs may still be there.
  int refusals = 0;
  for (int job = 0; job < 50 && refusals < 3; ++job) {
    const std::string refused = first_error(kPodB, absl::StrCat("refused", job));
    if (refused.empty()) continue;
    ++refusals;
    EXPECT_NE(refused.find(absl::StrCat(kTextOfPodB, " has 4 engines between nodes")),
              std::string::npos)
        << refused;
    EXPECT_EQ(first_error(kPodA, absl::StrCat("innocent", job)), "");
  }
  EXPECT_EQ(refusals, 3);
}

// What an ordinary user can make with systemd's help: any names below its own cgroup.
TEST_F(PodsTest, CgroupThatAUserMakesIsNoPod) {
  const TestDaemon daemon({"--quota_sessions_per_user=1"});
  const std::string own = "gradsync-test-user.slice";
  const std::string copy = absl::StrCat(own, "/", kPodA);
  for (const std::string& name : {own, own + "/kubepods", own + "/kubepods/burstable", copy}) {
    ASSERT_TRUE(Make(name)) << name;
  }
  const auto first = Rank(daemon, own, "first");
  ASSERT_TRUE(first->Join().ok());
  const Reply refused = Rank(daemon, copy, "second")->Join();
  EXPECT_EQ(refused.code, "RESOURCE_EXHAUSTED") << refused;
  EXPECT_NE(refused.message.find("user 0 has"), std::string::npos) << refused;
}

TEST_F(PodsTest, RootOfAPodSeesItsPodAndRootOfTheNodeSeesAll) {
  for (const bool sees_all : {false, true}) {
    const TestDaemon daemon({absl::StrCat("--pod_root_sees_all=", sees_all ? "true" : "false")});
    const auto a = Rank(daemon, kPodA, "a");
    const auto b = Rank(daemon, kPodB, "b");
    ASSERT_TRUE(a->Join().ok());
    ASSERT_TRUE(b->Join().ok());
    const Reply seen = a->Do("jobs socket=" + daemon.socket());
    EXPECT_NE(seen.Field("jobs").find("a/0/1"), std::string::npos) << seen;
    EXPECT_EQ(seen.Field("jobs").find("b/0/1") != std::string::npos, sees_all) << seen;
    EXPECT_EQ(daemon.Status().jobs_size(), 2);
  }
}

}  // namespace
}  // namespace gradsync::fault
