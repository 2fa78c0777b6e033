#include "daemon/session/descriptor_quota.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace gradsync::daemon {
namespace {

constexpr Tenant kAlice(1000), kBob(1001);

TEST(DescriptorQuotaTest, BoundsEachUser) {
  DescriptorQuota quota(10);
  auto six = quota.Take(kAlice, 6);
  ASSERT_TRUE(six.ok());
  EXPECT_EQ(quota.Of(kAlice), 6u);
  const absl::Status refused = quota.Take(kAlice, 5).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("has 6 file descriptors open for user 1000, of 10"),
            std::string::npos)
      << refused;
  EXPECT_TRUE(quota.Take(kBob, 10).ok());
  EXPECT_EQ(quota.Of(kBob), 0u) << "given back at once";
  EXPECT_TRUE(quota.Take(kAlice, 4).ok());
}

TEST(DescriptorQuotaTest, BoundsEachPodOfAUser) {
  DescriptorQuota quota(10);
  const Tenant pod(1000, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60"));
  const auto all = quota.Take(pod, 10);
  ASSERT_TRUE(all.ok());
  EXPECT_NE(quota.Take(pod, 1).status().message().find(
                "user 1000 in pod 6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60"),
            std::string::npos);
  EXPECT_EQ(quota.Of(kAlice), 0u);
  EXPECT_TRUE(quota.Take(kAlice, 10).ok()) << "the same user, in no pod";
}

TEST(DescriptorQuotaTest, IsGivenBackWithTheLastCopy) {
  DescriptorQuota quota(2);
  auto taken = quota.Take(kAlice, 2);
  ASSERT_TRUE(taken.ok());
  std::shared_ptr<void> copy = *taken;
  taken->reset();
  EXPECT_FALSE(quota.Take(kAlice, 1).ok());
  copy.reset();
  EXPECT_TRUE(quota.Take(kAlice, 2).ok());
}

// Each layout has two mappings and two descriptors. The allocators end a process that gets no more
// mappings.
TEST(DescriptorQuotaTest, TheLimitLeavesMappingsToTheDaemonsThreadsAndAllocators) {
  EXPECT_EQ(DescriptorQuota::LimitOfProcess(/*hard_limit=*/524'288, /*max_map_count=*/65'530),
            57'339u);
  EXPECT_EQ(DescriptorQuota::LimitOfProcess(524'288, 262'144), 229'376u);
  EXPECT_EQ(DescriptorQuota::LimitOfProcess(524'288, 1'048'576), 524'288u);
  EXPECT_EQ(DescriptorQuota::LimitOfProcess(1024, 65'530), 1024u);
}

TEST(DescriptorQuotaTest, MayEndBeforeWhatItGave) {
  std::shared_ptr<void> taken;
  {
    DescriptorQuota quota(2);
    taken = *quota.Take(kAlice, 2);
  }
  taken.reset();
}

}  // namespace
}  // namespace gradsync::daemon
