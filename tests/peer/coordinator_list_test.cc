#include "daemon/peer/coordinator_list.h"

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

bool Allows(const char* list, const char* address) {
  const auto parsed = CoordinatorList::Parse(list, 7417);
  EXPECT_TRUE(parsed.ok()) << list << ": " << parsed.status();
  return parsed.ok() && parsed->Allows(*ParsePeerAddress(address, 7417));
}

TEST(CoordinatorListTest, EmptyListAllowsEverything) {
  EXPECT_TRUE(Allows("", "node7:80"));
  EXPECT_TRUE(Allows("", "10.0.0.1"));
}

TEST(CoordinatorListTest, HostsAreComparedWithoutCase) {
  EXPECT_TRUE(Allows("node7, node8", "NODE8"));
  EXPECT_FALSE(Allows("node7, node8", "node9"));
  EXPECT_FALSE(Allows("node7", "node7.cluster.example"));
}

TEST(CoordinatorListTest, DomainAllowsItsHostsAtEveryDepth) {
  EXPECT_TRUE(Allows("*.cluster.example", "a.cluster.example"));
  EXPECT_TRUE(Allows("*.cluster.example", "a.b.cluster.example"));
  EXPECT_FALSE(Allows("*.cluster.example", "cluster.example"));
  EXPECT_FALSE(Allows("*.cluster.example", "evilcluster.example"));
}

TEST(CoordinatorListTest, AddressWithAZoneIsInNoDomain) {
  EXPECT_FALSE(Allows("*.cluster.example", "fe80::2%eth0.cluster.example"));
}

TEST(CoordinatorListTest, NetworkAllowsNumericAddressesOnly) {
  EXPECT_TRUE(Allows("10.1.0.0/15", "10.0.255.1"));
  EXPECT_TRUE(Allows("10.1.0.0/15", "10.1.2.3"));
  EXPECT_FALSE(Allows("10.1.0.0/15", "10.2.0.1"));
  EXPECT_FALSE(Allows("10.0.0.0/8", "node7"));
  EXPECT_FALSE(Allows("10.0.0.0/8", "::ffff:10.0.0.1"));
  EXPECT_TRUE(Allows("fd00::/9", "fd7f::1"));
  EXPECT_FALSE(Allows("fd00::/9", "fd80::1"));
  EXPECT_TRUE(Allows("0.0.0.0/0", "192.0.2.1"));
  EXPECT_TRUE(Allows("::1", "[0:0:0:0:0:0:0:1]"));
}

TEST(CoordinatorListTest, OnlyTheDefaultPortIsAllowedUnlessOneIsGiven) {
  EXPECT_FALSE(Allows("node7", "node7:7418"));
  EXPECT_TRUE(Allows("node7:7418", "node7:7418"));
  EXPECT_FALSE(Allows("node7:7418", "node7"));
  EXPECT_TRUE(Allows("10.0.0.0/8:80", "10.9.9.9:80"));
  EXPECT_FALSE(Allows("10.0.0.0/8:80", "10.9.9.9"));
  EXPECT_TRUE(Allows("*.example:80", "a.example:80"));
}

TEST(CoordinatorListTest, MalformedEntriesAreNamed) {
  for (const char* text :
       {",", "node7,", "node7:x", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/x", "node7/8", "*.10.0.0.1",
        "*.10.0.0.0/8", "*", "unix:/x", "a b", "fd00::/129"}) {
    const auto parsed = CoordinatorList::Parse(text, 7417);
    EXPECT_FALSE(parsed.ok()) << text;
    EXPECT_NE(parsed.status().message().find("is not a host"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace gradsync::daemon
