#include "daemon/peer/engine_quota.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/error.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kAlice(1000);

TEST(EngineQuotaTest, OneUserLeavesEnginesToTheOthers) {
  EngineQuota quota(2, nullptr);
  std::vector<std::shared_ptr<void>> held;
  for (int i = 0; i < 2; ++i) {
    auto taken = quota.Take(kAlice, 1);
    ASSERT_TRUE(taken.ok()) << taken.status();
    EXPECT_NE(*taken, nullptr);
    held.push_back(*std::move(taken));
  }
  const absl::Status refused = quota.Take(kAlice, 1).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, reason::kQuota);
  EXPECT_TRUE(absl::StrContains(refused.message(), "user 1000 has 2 engines")) << refused;
  EXPECT_TRUE(quota.Take(Tenant(1001), 1).ok());
  held.pop_back();
  EXPECT_TRUE(quota.Take(kAlice, 1).ok());
}

TEST(EngineQuotaTest, APodLeavesEnginesToTheOtherPodsOfItsUser) {
  EngineQuota quota(1, nullptr);
  const Tenant pod(1000, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60"));
  const auto held = quota.Take(pod, 1);
  ASSERT_TRUE(held.ok()) << held.status();
  const absl::Status refused = quota.Take(pod, 1).status();
  EXPECT_TRUE(absl::StrContains(refused.message(), absl::StrCat("user ", pod.Text(), " has 1")))
      << refused;
  EXPECT_TRUE(quota.Take(Tenant(1000, *PodId::Parse("0a4d5e7c111142229333abcdefabcdef")), 1).ok());
  EXPECT_TRUE(quota.Take(kAlice, 1).ok()) << "in no pod";
}

TEST(EngineQuotaTest, AllUsersTogetherHaveABound) {
  EngineQuota quota(2, nullptr);
  std::vector<std::shared_ptr<void>> held;
  for (uid_t user = 0; held.size() < quota.total(); ++user) {
    auto taken = quota.Take(Tenant(user), 1);
    ASSERT_TRUE(taken.ok()) << taken.status();
    held.push_back(*std::move(taken));
  }
  const absl::Status refused = quota.Take(kAlice, 1).status();
  EXPECT_EQ(DetailsOf(refused).reason, reason::kQuota);
  EXPECT_TRUE(absl::StrContains(refused.message(), "the daemon has 8 engines")) << refused;
  held.clear();
  EXPECT_TRUE(quota.Take(kAlice, 1).ok());
}

TEST(EngineQuotaTest, AnEnginesMemoryIsItsUsersUntilItEnds) {
  ArenaQuota memory(100, "quota_engine_bytes_per_user", "memory for engines");
  EngineQuota quota(3, &memory);
  auto first = quota.Take(kAlice, 60);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(memory.bytes_of(kAlice), 60u);
  const absl::Status refused = quota.Take(kAlice, 41).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, reason::kQuota);
  EXPECT_TRUE(absl::StrContains(refused.message(),
                                "user 1000 asks for 41 bytes of memory for engines and holds 60 of "
                                "a quota of 100 (quota_engine_bytes_per_user)"))
      << refused;
  EXPECT_TRUE(quota.Take(Tenant(1001), 41).ok());
  first->reset();
  EXPECT_EQ(memory.total_bytes(), 0u);
  EXPECT_TRUE(quota.Take(kAlice, 100).ok());
}

TEST(EngineQuotaTest, OneTooManyCostsNothing) {
  ArenaQuota memory(100);
  EngineQuota quota(1, &memory);
  const auto held = quota.Take(kAlice, 10);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_FALSE(quota.Take(kAlice, 10).ok());
  EXPECT_EQ(memory.total_bytes(), 10u);
}

TEST(EngineQuotaTest, PlacesOutliveTheQuota) {
  std::shared_ptr<void> held;
  {
    EngineQuota quota(1, nullptr);
    held = quota.Take(kAlice, 1).value();
  }
  held.reset();
}

}  // namespace
}  // namespace gradsync::daemon
