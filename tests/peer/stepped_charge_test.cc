#include "daemon/peer/stepped_charge.h"

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kFree = 1000;
constexpr std::size_t kMiB = std::size_t{1} << 20;

class SteppedChargeTest : public testing::Test {
 protected:
  absl::Status Hold(std::size_t bytes) { return charge_.Hold(account_, bytes); }

  ArenaQuota quota_{kMiB};
  const MemoryAccount account_{&quota_, Tenant(7)};
  SteppedCharge charge_{kFree};
};

TEST_F(SteppedChargeTest, ALittleCostsNothing) {
  EXPECT_EQ(charge_.granted(), kFree);
  EXPECT_TRUE(Hold(kFree).ok());
  EXPECT_EQ(quota_.total_bytes(), 0u);
}

TEST_F(SteppedChargeTest, MoreIsChargedInSteps) {
  EXPECT_TRUE(Hold(kFree + 1).ok());
  const std::uint64_t charged = quota_.bytes_of(account_.user);
  EXPECT_GT(charged, kFree);
  EXPECT_EQ(charge_.granted(), charged);
  EXPECT_TRUE(Hold(charged).ok());
  EXPECT_EQ(quota_.bytes_of(account_.user), charged);
  EXPECT_TRUE(Hold(charged + 1).ok());
  EXPECT_GT(quota_.bytes_of(account_.user), charged);
}

TEST_F(SteppedChargeTest, TheQuotaIsTheMost) {
  EXPECT_TRUE(Hold(kMiB / 2).ok());
  const std::size_t granted = charge_.granted();
  EXPECT_TRUE(absl::IsResourceExhausted(Hold(kMiB)));
  EXPECT_EQ(charge_.granted(), granted);
  EXPECT_EQ(quota_.bytes_of(account_.user), granted);
}

TEST_F(SteppedChargeTest, ReleaseGivesBackWhatIsNotFree) {
  EXPECT_TRUE(Hold(kMiB / 2).ok());
  charge_.Release();
  EXPECT_EQ(charge_.granted(), kFree);
  EXPECT_EQ(quota_.total_bytes(), 0u);
  EXPECT_TRUE(Hold(kMiB / 2).ok());
  EXPECT_GT(quota_.total_bytes(), kMiB / 2);
}

TEST(SteppedChargeWithoutQuotaTest, NothingIsRefused) {
  SteppedCharge charge(kFree);
  EXPECT_TRUE(charge.Hold(MemoryAccount{}, 1024 * kMiB).ok());
  EXPECT_GE(charge.granted(), 1024 * kMiB);
}

}  // namespace
}  // namespace gradsync::daemon
