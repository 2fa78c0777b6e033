#include "daemon/peer/address_jobs.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kHalf = AddressJobs::kMostBytes / 2;

JobKey Key(uid_t user) { return {user, "job", ""}; }

TEST(AddressJobsTest, AnAddressHasABoundWhateverUsersItNames) {
  AddressJobs jobs;
  std::vector<std::shared_ptr<void>> held;
  for (uid_t user = 1; user <= 2; ++user) held.push_back(*jobs.Add("10.0.0.1", Key(user), kHalf));
  const absl::Status refused = jobs.Add("10.0.0.1", Key(3), 1).status();
  EXPECT_EQ(DetailsOf(refused).reason, "QUOTA") << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "the nodes of 10.0.0.1 have joined jobs of"))
      << refused;
  EXPECT_TRUE(jobs.Add("10.0.0.2", Key(3), kHalf).ok());
  EXPECT_FALSE(jobs.Add("10.0.0.2", Key(3), ~std::uint64_t{0}).ok());
  held.clear();
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), 0u);
  EXPECT_TRUE(jobs.Add("10.0.0.1", Key(3), 2 * kHalf).ok());
}

TEST(AddressJobsTest, AJobCountsOnceAtItsLargest) {
  AddressJobs jobs;
  std::vector<std::shared_ptr<void>> held;
  for (int node = 0; node < 100; ++node) held.push_back(*jobs.Add("10.0.0.1", Key(1), kHalf));
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf);
  held.push_back(*jobs.Add("10.0.0.1", Key(1), kHalf + 100));
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf + 100);
  held.push_back(*jobs.Add("10.0.0.1", Key(1), 1));
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf + 100);
  held.resize(1);
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf + 100) << "a node of it is still in the job";
  held.clear();
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), 0u);
}

TEST(AddressJobsTest, WhatItGivesMayOutliveIt) {
  auto jobs = std::make_unique<AddressJobs>();
  const std::shared_ptr<void> held = *jobs->Add("10.0.0.1", Key(1), kHalf);
  EXPECT_NE(held, nullptr);
  jobs = nullptr;
}

}  // namespace
}  // namespace gradsync::daemon
