#include "daemon/base/rate_limit.h"

#include <gtest/gtest.h>

namespace gradsync::daemon {
namespace {

constexpr RateLimit::Rate kRate{/*most=*/3, /*each_ns=*/10};

TEST(RateLimit, AllowsSomeInARowAndRegainsOneAfterTheOther) {
  RateLimit limit;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(limit.Take(kRate, 100)) << i;
  EXPECT_FALSE(limit.Has(kRate, 109));
  EXPECT_FALSE(limit.Take(kRate, 109)) << "one that is refused does not count";
  EXPECT_TRUE(limit.Has(kRate, 110));
  EXPECT_TRUE(limit.Take(kRate, 110));
  EXPECT_FALSE(limit.Take(kRate, 110));
}

TEST(RateLimit, RegainsNoMoreThanAll) {
  RateLimit limit;
  EXPECT_TRUE(limit.HasAll(0));
  EXPECT_TRUE(limit.Take(kRate, 0));
  EXPECT_FALSE(limit.HasAll(9));
  EXPECT_TRUE(limit.HasAll(10));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(limit.Take(kRate, 1000)) << i;
  EXPECT_FALSE(limit.Take(kRate, 1000));
}

}  // namespace
}  // namespace gradsync::daemon
