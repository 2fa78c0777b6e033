#include "daemon/arena/arena_quota.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace gradsync::daemon {
namespace {

using Reservation = ArenaQuota::Reservation;

TEST(ArenaQuotaTest, HoldsUntilTheReservationEnds) {
  ArenaQuota quota(100);
  {
    const absl::StatusOr<Reservation> reservation = quota.Reserve(Tenant(1000), 60);
    ASSERT_TRUE(reservation.ok());
    EXPECT_EQ(reservation->bytes(), 60u);
    EXPECT_EQ(quota.bytes_of(Tenant(1000)), 60u);
    EXPECT_EQ(quota.total_bytes(), 60u);
  }
  EXPECT_EQ(quota.bytes_of(Tenant(1000)), 0u);
  EXPECT_EQ(quota.total_bytes(), 0u);
}

TEST(ArenaQuotaTest, RefusesMoreThanTheQuotaAndSaysWhy) {
  ArenaQuota quota(100);
  const absl::StatusOr<Reservation> first = quota.Reserve(Tenant(1000), 60);
  ASSERT_TRUE(first.ok());
  const absl::StatusOr<Reservation> second = quota.Reserve(Tenant(1000), 41);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(second.status().message());
  for (const char* part : {"1000", "41", "60", "100", "quota_arena_bytes_per_user"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
  }
  EXPECT_EQ(quota.total_bytes(), 60u);
  EXPECT_TRUE(quota.Reserve(Tenant(1000), 40).ok());
}

TEST(ArenaQuotaTest, EachUserHasItsOwnQuota) {
  ArenaQuota quota(100);
  const absl::StatusOr<Reservation> a = quota.Reserve(Tenant(1), 100);
  const absl::StatusOr<Reservation> b = quota.Reserve(Tenant(2), 100);
  EXPECT_TRUE(a.ok());
  EXPECT_TRUE(b.ok());
  EXPECT_EQ(quota.total_bytes(), 200u);
}

TEST(ArenaQuotaTest, HugeSizesDoNotWrapAround) {
  ArenaQuota quota(100);
  const absl::StatusOr<Reservation> one = quota.Reserve(Tenant(1), 1);
  ASSERT_TRUE(one.ok());
  EXPECT_FALSE(quota.Reserve(Tenant(1), std::numeric_limits<std::uint64_t>::max()).ok());
  ArenaQuota unbounded(std::numeric_limits<std::uint64_t>::max());
  const absl::StatusOr<Reservation> all =
      unbounded.Reserve(Tenant(1), std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(all.ok());
  EXPECT_FALSE(unbounded.Reserve(Tenant(1), 1).ok());
}

TEST(ArenaQuotaTest, NothingCanBeReservedOnAFullQuota) {
  ArenaQuota quota(0);
  EXPECT_TRUE(quota.Reserve(Tenant(1), 0).ok());
  EXPECT_FALSE(quota.Reserve(Tenant(1), 1).ok());
}

TEST(ArenaQuotaTest, MovesKeepTheCount) {
  ArenaQuota quota(100);
  Reservation a = *quota.Reserve(Tenant(1), 30);
  Reservation b = std::move(a);
  EXPECT_EQ(quota.total_bytes(), 30u);
  Reservation c = *quota.Reserve(Tenant(1), 20);
  c = std::move(b);  // gives back c's 20
  EXPECT_EQ(quota.total_bytes(), 30u);
  EXPECT_EQ(c.bytes(), 30u);
  c = Reservation();
  EXPECT_EQ(quota.total_bytes(), 0u);
}

TEST(ArenaQuotaTest, ConcurrentReservationsNeverExceedTheQuota) {
  ArenaQuota quota(10);
  std::vector<std::thread> threads;
  std::vector<int> refused(4);
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) {
        const absl::StatusOr<Reservation> reservation = quota.Reserve(Tenant(1), 4);
        if (!reservation.ok()) ++refused[t];
        EXPECT_LE(quota.bytes_of(Tenant(1)), 10u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(quota.total_bytes(), 0u);
}

TEST(ArenaQuotaTest, ReservationGrowsAndShrinks) {
  ArenaQuota quota(100, "quota_x", "x");
  Reservation a = *quota.Reserve(Tenant(1), 0);
  EXPECT_TRUE(a.Resize(70).ok());
  EXPECT_EQ(quota.bytes_of(Tenant(1)), 70u);
  const absl::Status refused = a.Resize(101);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("quota_x"), std::string::npos) << refused;
  EXPECT_EQ(a.bytes(), 70u);
  EXPECT_TRUE(a.Resize(10).ok());
  EXPECT_EQ(quota.bytes_of(Tenant(1)), 10u);
  Reservation none;
  EXPECT_TRUE(none.Resize(1000).ok());
  EXPECT_EQ(none.bytes(), 0u);
}

TEST(ArenaQuotaTest, SplitKeepsTheSum) {
  ArenaQuota quota(100);
  Reservation all = *quota.Reserve(Tenant(1), 60);
  Reservation part = all.Split(20);
  EXPECT_EQ(all.bytes(), 40u);
  EXPECT_EQ(part.bytes(), 20u);
  EXPECT_EQ(quota.bytes_of(Tenant(1)), 60u);
  all = Reservation();
  EXPECT_EQ(quota.bytes_of(Tenant(1)), 20u);
  EXPECT_EQ(part.Split(1000).bytes(), 20u);
  EXPECT_EQ(part.bytes(), 0u);
}

TEST(ArenaQuotaTest, ListsTheUsersThatHoldSomething) {
  ArenaQuota quota(100);
  const Reservation b = *quota.Reserve(Tenant(2), 7);
  const Reservation a = *quota.Reserve(Tenant(1), 5);
  const Reservation nothing = *quota.Reserve(Tenant(3), 0);
  EXPECT_EQ(quota.Users(),
            (std::vector<std::pair<Tenant, std::uint64_t>>{{Tenant(1), 5}, {Tenant(2), 7}}));
  EXPECT_EQ(quota.bytes_per_user(), 100u);
}

TEST(ArenaQuotaTest, EachPodOfAUserHasAQuota) {
  ArenaQuota quota(100);
  const Tenant a(1000, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60"));
  const Tenant b(1000, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f61"));
  const auto all = quota.Reserve(a, 100);
  ASSERT_TRUE(all.ok());
  const absl::Status refused = quota.Reserve(a, 1).status();
  EXPECT_NE(refused.message().find("user 1000 in pod 6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60 asks"),
            std::string::npos)
      << refused;
  EXPECT_TRUE(quota.Reserve(b, 100).ok());
  EXPECT_TRUE(quota.Reserve(Tenant(1000), 100).ok()) << "in no pod";
  EXPECT_EQ(quota.Users(), (std::vector<std::pair<Tenant, std::uint64_t>>{{a, 100}}));
}

TEST(MemoryAccountTest, WithoutAQuotaNothingIsCharged) {
  const MemoryAccount account;
  const auto reservation = account.Reserve(std::numeric_limits<std::uint64_t>::max());
  ASSERT_TRUE(reservation.ok());
  EXPECT_EQ(reservation->bytes(), 0u);
}

}  // namespace
}  // namespace gradsync::daemon
