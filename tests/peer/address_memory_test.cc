#include "daemon/peer/address_memory.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/error.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kPerUser = 1000;
constexpr std::uint64_t kMost = AddressMemory::kQuotas * kPerUser;

class AddressMemoryTest : public testing::Test {
 protected:
  // What a node of the address may reserve for the user.
  MemoryAccount AccountOf(const std::string& address, uid_t user, const std::string& network = "") {
    return {&quota_, Tenant(user), memory_.Of(address, network.empty() ? address : network)};
  }
  absl::Status Hold(const MemoryAccount& account, std::uint64_t bytes) {
    auto held = account.Reserve(bytes);
    if (!held.ok()) return held.status();
    held_.push_back(*std::move(held));
    return absl::OkStatus();
  }

  ArenaQuota quota_{kPerUser};
  AddressMemory memory_{kPerUser};
  std::vector<ArenaQuota::Reservation> held_;
};

TEST_F(AddressMemoryTest, AnAddressHasABoundWhateverUsersItNames) {
  EXPECT_TRUE(Hold(AccountOf("10.0.0.1", 1), kPerUser).ok());
  EXPECT_TRUE(Hold(AccountOf("10.0.0.1", 2), kPerUser).ok());
  const absl::Status refused = Hold(AccountOf("10.0.0.1", 3), 1);
  EXPECT_EQ(DetailsOf(refused).reason, "QUOTA") << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "the nodes of 10.0.0.1 make this daemon keep"))
      << refused;
  EXPECT_EQ(quota_.bytes_of(Tenant(3)), 0u) << "a refusal counts nowhere";
  EXPECT_TRUE(Hold(AccountOf("10.0.0.2", 3), kPerUser).ok());
  held_.clear();
  EXPECT_EQ(memory_.BytesOf("10.0.0.1"), 0u);
  EXPECT_TRUE(Hold(AccountOf("10.0.0.1", 3), kPerUser).ok());
}

TEST_F(AddressMemoryTest, TheUsersQuotaHoldsToo) {
  const MemoryAccount account = AccountOf("10.0.0.1", 1);
  EXPECT_TRUE(Hold(account, kPerUser).ok());
  EXPECT_FALSE(Hold(account, 1).ok());
  EXPECT_FALSE(Hold(account, ~std::uint64_t{0}).ok());
  EXPECT_EQ(memory_.BytesOf("10.0.0.1"), kPerUser);
}

TEST_F(AddressMemoryTest, AReservationCountsWhatItHas) {
  ArenaQuota::Reservation whole = *AccountOf("10.0.0.1", 1).Reserve(100);
  ASSERT_TRUE(whole.Resize(300).ok());
  EXPECT_EQ(memory_.BytesOf("10.0.0.1"), 300u);
  ASSERT_TRUE(whole.Resize(200).ok());
  ArenaQuota::Reservation part = whole.Split(50);
  whole = {};
  EXPECT_EQ(memory_.BytesOf("10.0.0.1"), 50u);
  const ArenaQuota::Reservation moved = std::move(part);
  EXPECT_EQ(memory_.BytesOf("10.0.0.1"), 50u);
}

TEST_F(AddressMemoryTest, AnAddressLeavesRoomForItsNetwork) {
  constexpr char kNetwork[] = "2001:db8::/64";
  uid_t user = 0;
  const auto fill = [&](const std::string& address) {
    for (std::uint64_t i = 0; i < AddressMemory::kQuotas; ++i) {
      EXPECT_TRUE(Hold(AccountOf(address, ++user, kNetwork), kPerUser).ok()) << address;
    }
  };
  fill("2001:db8::1");
  const absl::Status address_full = Hold(AccountOf("2001:db8::1", ++user, kNetwork), 1);
  EXPECT_TRUE(absl::StrContains(address_full.message(), "the nodes of 2001:db8::1 make"))
      << address_full;
  fill("2001:db8::2");
  const absl::Status network_full = Hold(AccountOf("2001:db8::3", ++user, kNetwork), 1);
  EXPECT_TRUE(absl::StrContains(network_full.message(), "the nodes of 2001:db8::/64 make"))
      << network_full;
  EXPECT_EQ(memory_.BytesOf("2001:db8::3"), 0u);
  EXPECT_EQ(memory_.BytesOf(kNetwork), 2 * kMost);
  EXPECT_TRUE(Hold(AccountOf("2001:db8:0:1::1", ++user, "2001:db8:0:1::/64"), kPerUser).ok());
}

// Whoever has left may still be charged, but not its address.
TEST_F(AddressMemoryTest, AReservationCanLeaveItsAddress) {
  ArenaQuota::Reservation whole = *AccountOf("10.0.0.1", 1).Reserve(100);
  whole.LeaveOrigin();
  EXPECT_EQ(memory_.BytesOf("10.0.0.1"), 0u);
  EXPECT_EQ(quota_.bytes_of(Tenant(1)), 100u);
  ASSERT_TRUE(whole.Resize(200).ok());
  EXPECT_EQ(memory_.BytesOf("10.0.0.1"), 0u);
}

TEST(AddressMemory, ReservationsOutliveTheLimit) {
  ArenaQuota quota(kPerUser);
  auto memory = std::make_unique<AddressMemory>(kPerUser);
  const MemoryAccount account{&quota, Tenant(1), memory->Of("10.0.0.1", "10.0.0.1")};
  const auto held = account.Reserve(1);
  EXPECT_TRUE(held.ok());
  memory = nullptr;
}

}  // namespace
}  // namespace gradsync::daemon
