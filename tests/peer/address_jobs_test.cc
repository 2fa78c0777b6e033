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
  for (uid_t user = 1; user <= 2; ++user)
    held.push_back(*jobs.Add("10.0.0.1", "10.0.0.1", Key(user), kHalf));
  const absl::Status refused = jobs.Add("10.0.0.1", "10.0.0.1", Key(3), 1).status();
  EXPECT_EQ(DetailsOf(refused).reason, "QUOTA") << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "the nodes of 10.0.0.1 have joined jobs of"))
      << refused;
  EXPECT_TRUE(jobs.Add("10.0.0.2", "10.0.0.2", Key(3), kHalf).ok());
  EXPECT_FALSE(jobs.Add("10.0.0.2", "10.0.0.2", Key(3), ~std::uint64_t{0}).ok());
  held.clear();
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), 0u);
  EXPECT_TRUE(jobs.Add("10.0.0.1", "10.0.0.1", Key(3), 2 * kHalf).ok());
}

TEST(AddressJobsTest, AnAddressLeavesRoomForItsNetwork) {
  AddressJobs jobs;
  std::vector<std::shared_ptr<void>> held;
  const auto add = [&](int node, uid_t user, std::uint64_t bytes) {
    auto added = jobs.Add(absl::StrCat("2001:db8::", node), "2001:db8::/64", Key(user), bytes);
    if (!added.ok()) return added.status();
    held.push_back(*std::move(added));
    return absl::OkStatus();
  };
  EXPECT_TRUE(add(1, 1, 2 * kHalf).ok());
  const absl::Status address_full = add(1, 2, 1);
  EXPECT_TRUE(absl::StrContains(address_full.message(), "the nodes of 2001:db8::1 have joined"))
      << address_full;
  for (int node = 2; node <= 4; ++node) {
    EXPECT_TRUE(add(node, static_cast<uid_t>(node), 2 * kHalf).ok()) << node;
  }
  EXPECT_TRUE(add(5, 1, kHalf).ok()) << "the network counts this job once";
  const absl::Status network_full = add(5, 5, 1);
  EXPECT_EQ(DetailsOf(network_full).reason, "QUOTA") << network_full;
  EXPECT_TRUE(
      absl::StrContains(network_full.message(), "the nodes of 2001:db8::/64 have joined jobs of"))
      << network_full;
  EXPECT_EQ(jobs.BytesOf("2001:db8::5"), kHalf) << "the refused job counts nowhere";
  EXPECT_EQ(jobs.BytesOf("2001:db8::/64"), AddressJobs::kMostBytesOfNetwork);
  EXPECT_TRUE(jobs.Add("2001:db8:0:1::1", "2001:db8:0:1::/64", Key(5), 1).ok());
  held.clear();
  EXPECT_EQ(jobs.BytesOf("2001:db8::1"), 0u);
  EXPECT_EQ(jobs.BytesOf("2001:db8::/64"), 0u);
}

TEST(AddressJobsTest, AJobCountsOnceAtItsLargest) {
  AddressJobs jobs;
  std::vector<std::shared_ptr<void>> held;
  for (int node = 0; node < 100; ++node)
    held.push_back(*jobs.Add("10.0.0.1", "10.0.0.1", Key(1), kHalf));
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf);
  held.push_back(*jobs.Add("10.0.0.1", "10.0.0.1", Key(1), kHalf + 100));
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf + 100);
  held.push_back(*jobs.Add("10.0.0.1", "10.0.0.1", Key(1), 1));
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf + 100);
  held.resize(1);
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), kHalf + 100) << "a node of it is still in the job";
  held.clear();
  EXPECT_EQ(jobs.BytesOf("10.0.0.1"), 0u);
}

TEST(AddressJobsTest, WhatItGivesMayOutliveIt) {
  auto jobs = std::make_unique<AddressJobs>();
  const std::shared_ptr<void> held = *jobs->Add("10.0.0.1", "10.0.0.1", Key(1), kHalf);
  EXPECT_NE(held, nullptr);
  jobs = nullptr;
}

}  // namespace
}  // namespace gradsync::daemon
