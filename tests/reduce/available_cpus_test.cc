#include "daemon/reduce/available_cpus.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace gradsync::daemon {
namespace {

// A directory that takes the place of /sys/fs/cgroup.
class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    mount_ = std::filesystem::path(testing::TempDir()) /
             testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(mount_);
  }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = mount_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  int Quota(const std::string& membership) { return CgroupCpuQuota(membership, mount_.string()); }

  std::filesystem::path mount_;
};

TEST_F(CgroupTest, NoFilesMeanNoQuota) {
  EXPECT_EQ(Quota(""), 0);
  EXPECT_EQ(Quota("0::/\n"), 0);
  EXPECT_EQ(Quota("0::/system.slice/gradsyncd.service\n"), 0);
  EXPECT_EQ(Quota("nonsense"), 0);
}

TEST_F(CgroupTest, Version2RoundsUp) {
  Write("a/cpu.max", "250000 100000\n");
  EXPECT_EQ(Quota("0::/a\n"), 3);
  Write("a/cpu.max", "200000 100000\n");
  EXPECT_EQ(Quota("0::/a\n"), 2);
  Write("a/cpu.max", "1000 100000\n");
  EXPECT_EQ(Quota("0::/a\n"), 1);
  Write("a/cpu.max", "max 100000\n");
  EXPECT_EQ(Quota("0::/a\n"), 0);
}

TEST_F(CgroupTest, SmallestQuotaUpToTheRootCounts) {
  Write("pod/cpu.max", "400000 100000\n");
  Write("pod/daemon/cpu.max", "max 100000\n");
  Write("other/cpu.max", "100000 100000\n");
  EXPECT_EQ(Quota("0::/pod/daemon\n"), 4);
  Write("pod/daemon/cpu.max", "600000 100000\n");
  EXPECT_EQ(Quota("0::/pod/daemon\n"), 4);
  Write("cpu.max", "300000 100000\n");
  EXPECT_EQ(Quota("0::/pod/daemon\n"), 3);
}

TEST_F(CgroupTest, PathOutsideTheMountFallsBackToItsRoot) {
  Write("cpu.max", "200000 100000\n");
  EXPECT_EQ(Quota("0::/../../host/pod\n"), 2);
}

TEST_F(CgroupTest, ReadsVersion1) {
  Write("cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n");
  Write("cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Quota("5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"), 2);
  Write("cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(Quota("4:cpu,cpuacct:/job\n"), 0);
}

TEST(AvailableCpusTest, IsAtLeastOne) { EXPECT_GE(AvailableCpus(), 1); }

}  // namespace
}  // namespace gradsync::daemon
