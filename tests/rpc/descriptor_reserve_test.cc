#include "daemon/rpc/descriptor_reserve.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace gradsync::daemon
