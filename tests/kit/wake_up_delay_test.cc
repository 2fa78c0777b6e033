#include "tests/kit/wake_up_delay.h"

#include "gtest/gtest.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

TEST(FairBound, IsTheBoundOrLarger) { EXPECT_GE(FairBoundNs(1000, NowNs()), 1000u); }

TEST(FairBound, OfAMedianIsTheBoundOrLarger) {
  EXPECT_GE(FairBoundNs(1000, NowNs(), /*share=*/0.5), 1000u);
}

// A thread that has not started, or a clock that differs, would loosen every bound.
TEST(FairBound, AddsSecondsAtMost) { EXPECT_LT(FairBoundNs(0, NowNs()), 60'000'000'000u); }

}  // namespace
}  // namespace gradsync
