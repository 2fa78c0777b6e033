#include "daemon/rpc/busiest_caller.h"

#include <gtest/gtest.h>

namespace gradsync::daemon {
namespace {

TEST(BusiestCallerTest, TheOldestCallOfTheProcessWithTheMost) {
  EXPECT_EQ(OldestOfBusiest({1}), 0u);
  EXPECT_EQ(OldestOfBusiest({1, 2, 2}), 1u);
  EXPECT_EQ(OldestOfBusiest({3, 2, 1, 2, 1, 2}), 1u);
}

// A probe that has come just now is not the oldest.
TEST(BusiestCallerTest, TheOldestOfAllIfEachProcessHasAsMany) {
  EXPECT_EQ(OldestOfBusiest({999, 1000, 300}), 0u);
  EXPECT_EQ(OldestOfBusiest({9, 7, 8, 8, 7}), 1u);
}

}  // namespace
}  // namespace gradsync::daemon
