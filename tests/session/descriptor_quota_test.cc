#include "daemon/session/descriptor_quota.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace gradsync::daemon {
namespace {

constexpr uid_t kAlice = 1000, kBob = 1001;

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
