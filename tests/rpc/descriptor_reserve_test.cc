#include "daemon/rpc/descriptor_reserve.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace gradsync::daemon {
namespace {

constexpr std::size_t kOne = Connections::kDescriptors;

TEST(DescriptorReserveTest, KeepsTheLastOnesForRootAndTheDaemonsUser) {
  DescriptorReserve reserve(DescriptorReserve::kForTrusted + kOne);
  ASSERT_TRUE(reserve.full());
  ASSERT_TRUE(reserve.Free(kOne));
  EXPECT_TRUE(reserve.Admits(0, /*trusted=*/false));
  ASSERT_TRUE(reserve.Free(kOne));
  EXPECT_FALSE(reserve.Admits(0, /*trusted=*/false));
  for (std::size_t others = 0; others < DescriptorReserve::kPerUser; ++others) {
    EXPECT_TRUE(reserve.Admits(others, /*trusted=*/true)) << others;
  }
  reserve.Refill();
  EXPECT_TRUE(reserve.full());
  EXPECT_TRUE(reserve.Admits(0, /*trusted=*/false));
}

TEST(DescriptorReserveTest, AUserHasFewConnectionsFromIt) {
  const DescriptorReserve reserve(DescriptorReserve::kForTrusted);
  for (const bool trusted : {false, true}) {
    EXPECT_TRUE(reserve.Admits(DescriptorReserve::kPerUser - 1, trusted));
    EXPECT_FALSE(reserve.Admits(DescriptorReserve::kPerUser, trusted));
  }
}

TEST(DescriptorReserveTest, GivesNoMoreThanItHolds) {
  DescriptorReserve reserve(2);
  EXPECT_FALSE(reserve.Free(3));
  EXPECT_TRUE(reserve.full());
  EXPECT_TRUE(reserve.Free(2));
  EXPECT_FALSE(reserve.Free(1));
}

// Otherwise sessions, layouts and other nodes could take what a connection gives back.
TEST(DescriptorReserveTest, DescriptorsAreScarceUntilItIsFullAgain) {
  constexpr Tenant kUser(1000);
  DescriptorQuota quota(100);
  DescriptorReserve reserve(2 * kOne, &quota);
  EXPECT_TRUE(quota.Take(kUser, 1).ok());
  ASSERT_TRUE(reserve.Free(kOne));
  EXPECT_TRUE(quota.scarce());
  EXPECT_EQ(quota.Take(kUser, 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(quota.TakeForConnection(kUser, 1).ok()) << "it asks";
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  reserve.Refill();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(quota.scarce()) << "none was free";
  reserve.Refill();
  EXPECT_FALSE(quota.scarce());
  EXPECT_TRUE(quota.Take(kUser, 1).ok());
}

}  // namespace
}  // namespace gradsync::daemon
