#include "daemon/peer/engine_quota.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kAlice = 1000;

TEST(EngineQuotaTest, OneUserLeavesEnginesToTheOthers) {
  EngineQuota quota(2);
  std::vector<std::shared_ptr<void>> held;
  for (int i = 0; i < 2; ++i) {
    auto taken = quota.Take(kAlice);
    ASSERT_TRUE(taken.ok()) << taken.status();
    EXPECT_NE(*taken, nullptr);
    held.push_back(*std::move(taken));
  }
  const absl::Status refused = quota.Take(kAlice).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, reason::kQuota);
  EXPECT_TRUE(absl::StrContains(refused.message(), "user 1000 has 2 engines")) << refused;
  EXPECT_TRUE(quota.Take(kAlice + 1).ok());
  held.pop_back();
  EXPECT_TRUE(quota.Take(kAlice).ok());
}

TEST(EngineQuotaTest, AllUsersTogetherHaveABound) {
  EngineQuota quota(2);
  std::vector<std::shared_ptr<void>> held;
  for (std::uint32_t user = 0; held.size() < quota.total(); ++user) {
    auto taken = quota.Take(user);
    ASSERT_TRUE(taken.ok()) << taken.status();
    held.push_back(*std::move(taken));
  }
  const absl::Status refused = quota.Take(kAlice).status();
  EXPECT_EQ(DetailsOf(refused).reason, reason::kQuota);
  EXPECT_TRUE(absl::StrContains(refused.message(), "the daemon has 8 engines")) << refused;
  held.clear();
  EXPECT_TRUE(quota.Take(kAlice).ok());
}

TEST(EngineQuotaTest, WhatItGivesOutlivesIt) {
  std::shared_ptr<void> held;
  {
    EngineQuota quota(1);
    held = quota.Take(kAlice).value();
  }
  held.reset();
}

}  // namespace
}  // namespace gradsync::daemon
