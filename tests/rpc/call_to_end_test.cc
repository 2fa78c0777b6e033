#include "daemon/rpc/call_to_end.h"

#include <gtest/gtest.h>

namespace gradsync::daemon {
namespace {

constexpr pid_t kFlood = 9, kProbe = 7, kOther = 8;

OpenCall Waits(pid_t process) { return {process, /*answer_is_due=*/false}; }
OpenCall IsDue(pid_t process) { return {process, /*answer_is_due=*/true}; }

TEST(CallToEndTest, TheOldestThatWaitsOfTheProcessWithTheMostCalls) {
  EXPECT_EQ(CallToEnd({Waits(kFlood)}, kFlood), 0u);
  EXPECT_EQ(CallToEnd({Waits(kProbe), Waits(kFlood), Waits(kFlood)}, kFlood), 1u);
  EXPECT_EQ(CallToEnd({Waits(kProbe), IsDue(kFlood), Waits(kFlood), Waits(kFlood)}, kOther), 2u);
}

TEST(CallToEndTest, TheOldestIfEachProcessHasAsMany) {
  EXPECT_EQ(CallToEnd({Waits(kFlood), Waits(kOther), Waits(kProbe)}, kFlood), 0u);
  EXPECT_EQ(CallToEnd({Waits(kFlood), Waits(kProbe), Waits(kOther), Waits(kOther), Waits(kProbe)},
                      kFlood),
            1u);
}

// The probe has its answer, and its client has not read it yet.
TEST(CallToEndTest, AProbeKeepsItsCallThoughTheOthersWaitForAnswers) {
  EXPECT_EQ(CallToEnd({Waits(kProbe), IsDue(kFlood), IsDue(kFlood)}, kFlood), std::nullopt);
}

TEST(CallToEndTest, AProbeGetsRoomThoughAllWaitForAnswers) {
  EXPECT_EQ(CallToEnd({IsDue(kFlood), IsDue(kFlood), IsDue(kFlood)}, kProbe), 0u);
  EXPECT_EQ(CallToEnd({IsDue(kProbe), IsDue(kFlood), IsDue(kFlood), IsDue(kFlood)}, kProbe), 1u);
}

TEST(CallToEndTest, TheNewOneIsRefusedIfItsProcessHasAsMany) {
  EXPECT_EQ(CallToEnd({IsDue(kFlood), IsDue(kFlood)}, kFlood), std::nullopt);
  EXPECT_EQ(CallToEnd({IsDue(kFlood), IsDue(kOther)}, kProbe), std::nullopt);
  EXPECT_EQ(CallToEnd({IsDue(kFlood), IsDue(kFlood), IsDue(kProbe)}, kProbe), std::nullopt);
}

}  // namespace
}  // namespace gradsync::daemon
