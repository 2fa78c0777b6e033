#include "daemon/rpc/connect_rate.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

namespace gradsync::daemon {
namespace {

constexpr Tenant kAlice(1000), kBob(1001);
constexpr std::size_t kBurst = 16;
constexpr std::uint64_t kEachNs = KeyedRate<Tenant>::kRegainNs / kBurst;

TEST(ConnectRateTest, BurstIsAllowedAtOnce) {
  ConnectRate rate(kBurst);
  const std::uint64_t now_ns = 5;
  for (std::size_t i = 0; i < kBurst; ++i) EXPECT_TRUE(rate.Take(kAlice, now_ns)) << i;
  EXPECT_FALSE(rate.Take(kAlice, now_ns));
  EXPECT_TRUE(rate.Take(kBob, now_ns)) << "another user has as many";
}

TEST(ConnectRateTest, RegainsOneAfterTheOther) {
  ConnectRate rate(kBurst);
  std::uint64_t now_ns = 1'000'000'000;
  while (rate.Take(kAlice, now_ns)) {
  }
  EXPECT_FALSE(rate.Take(kAlice, now_ns + kEachNs - 1)) << "a refused connection costs nothing";
  EXPECT_TRUE(rate.Take(kAlice, now_ns + kEachNs));
  EXPECT_FALSE(rate.Take(kAlice, now_ns + kEachNs));
  now_ns += KeyedRate<Tenant>::kRegainNs + kEachNs;
  for (std::size_t i = 0; i < kBurst; ++i) EXPECT_TRUE(rate.Take(kAlice, now_ns)) << i;
  EXPECT_FALSE(rate.Take(kAlice, now_ns)) << "never more than a burst";
}

TEST(ConnectRateTest, RemembersAUserAmongMany) {
  ConnectRate rate(kBurst);
  while (rate.Take(kAlice, 0)) {
  }
  for (uid_t other = 2000; other < 5000; ++other) EXPECT_TRUE(rate.Take(Tenant(other), 0));
  EXPECT_FALSE(rate.Take(kAlice, 0));
}

TEST(ConnectRateTest, SaysWithoutCountingWhetherAUserHasOne) {
  ConnectRate rate(kBurst);
  const std::uint64_t now_ns = 5;
  for (std::size_t i = 0; i < kBurst; ++i) {
    for (std::size_t times = 0; times < kBurst; ++times) EXPECT_TRUE(rate.Has(kAlice, now_ns));
    EXPECT_TRUE(rate.Take(kAlice, now_ns)) << i;
  }
  EXPECT_FALSE(rate.Has(kAlice, now_ns));
  EXPECT_TRUE(rate.Has(kBob, now_ns));
  EXPECT_FALSE(rate.Has(kAlice, now_ns + kEachNs - 1));
  EXPECT_TRUE(rate.Has(kAlice, now_ns + kEachNs));
}

TEST(ConnectRateTest, RefusesAProcessForAWhile) {
  ConnectRate rate(kBurst);
  const std::uint64_t now_ns = 5;
  EXPECT_EQ(rate.Refuses(11, now_ns), std::nullopt);
  rate.Refuse(11, kAlice, now_ns);
  EXPECT_EQ(rate.Refuses(11, now_ns + ConnectRate::kRefusedNs - 1), kAlice);
  EXPECT_EQ(rate.Refuses(12, now_ns), std::nullopt) << "another one of the same user";
  EXPECT_EQ(rate.Refuses(11, now_ns + ConnectRate::kRefusedNs), std::nullopt);
  rate.Refuse(0, kAlice, now_ns);
  EXPECT_EQ(rate.Refuses(0, now_ns), std::nullopt)
      << "all processes of another PID namespace have this pid";
}

}  // namespace
}  // namespace gradsync::daemon
