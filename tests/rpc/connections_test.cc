#include "daemon/rpc/connections.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

// Limits the descriptors of this process while it lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t limit) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit changed{limit, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &changed), 0);
  }
  ~DescriptorLimit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

ClientProcess Client(uid_t uid, pid_t pid = 1) {
  ClientProcess process;
  process.uid = uid;
  process.pid = pid;
  return process;
}

std::string Name(const UniqueFd& fd) { return absl::StrCat("fd:", fd.get()); }

class ConnectionsTest : public testing::Test {
 protected:
  DescriptorLimit limit_{4096};
  DescriptorQuota quota_{100'000};
  Connections connections_{&quota_};
  const UniqueFd accepted_{open("/dev/null", O_RDONLY | O_CLOEXEC)};
};

TEST_F(ConnectionsTest, ProcessIsFoundByGrpcsName) {
  const auto a = connections_.Admit(accepted_, Client(1000, 11));
  const auto b = connections_.Admit(accepted_, Client(1001, 22));
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(connections_.Find(Name(a->for_grpc))->pid, 11);
  EXPECT_EQ(connections_.Find(Name(b->for_grpc))->pid, 22);
  EXPECT_EQ(connections_.Find(Name(b->for_grpc))->uid, 1001u);
}

TEST_F(ConnectionsTest, EachPodOfAUserHasItsOwn) {
  ClientProcess in_pod = Client(1000);
  in_pod.place = {PodPlace::Kind::kPod, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60")};
  DescriptorQuota quota(2 * Connections::kDescriptors);
  Connections connections(&quota);
  const auto first = connections.Admit(accepted_, in_pod);
  const auto second = connections.Admit(accepted_, in_pod);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(connections.Count(in_pod.tenant()), 2u);
  EXPECT_TRUE(connections.IsFull(in_pod.tenant()));
  EXPECT_FALSE(connections.Admit(accepted_, in_pod).ok());
  EXPECT_EQ(connections.Count(Tenant(1000)), 0u);
  EXPECT_FALSE(connections.IsFull(Tenant(1000)));
  EXPECT_TRUE(connections.Admit(accepted_, Client(1000)).ok());
}

TEST_F(ConnectionsTest, GrpcsDescriptorIsACopyWithCloseOnExec) {
  const auto admitted = connections_.Admit(accepted_, Client(1000));
  ASSERT_TRUE(admitted.ok());
  EXPECT_NE(admitted->for_grpc.get(), accepted_.get());
  EXPECT_GE(admitted->for_grpc.get(), 256);  // above the daemon's own
  EXPECT_EQ(fcntl(admitted->for_grpc.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST_F(ConnectionsTest, OtherNamesAreNotFound) {
  const auto admitted = connections_.Admit(accepted_, Client(1000));
  ASSERT_TRUE(admitted.ok());
  const std::string number = absl::StrCat(admitted->for_grpc.get());
  for (const std::string& name : {std::string(), std::string("fd:"), std::string("fd:1"), number,
                                  "unix:" + number, "fd:" + number + "x", "fd:-" + number,
                                  "fd:99999999999999999999" + number, "ipv4:127.0.0.1:" + number}) {
    EXPECT_FALSE(connections_.Find(name).has_value()) << name;
  }
}

TEST_F(ConnectionsTest, RemovedConnectionIsNotFound) {
  const auto admitted = connections_.Admit(accepted_, Client(1000));
  ASSERT_TRUE(admitted.ok());
  connections_.Remove(admitted->id);
  EXPECT_FALSE(connections_.Find(Name(admitted->for_grpc)).has_value());
  connections_.Remove(admitted->id);  // a second time
  connections_.Remove(12345);
}

TEST_F(ConnectionsTest, DescriptorNumbersAreReusedLate) {
  std::set<int> numbers;
  for (int i = 0; i < 1000; ++i) {
    const auto admitted = connections_.Admit(accepted_, Client(1000));
    ASSERT_TRUE(admitted.ok());
    EXPECT_TRUE(numbers.insert(admitted->for_grpc.get()).second);
    connections_.Remove(admitted->id);
  }
}

TEST_F(ConnectionsTest, ReusedNumberBelongsToTheLastConnection) {
  DescriptorLimit few(300);
  Connections connections(&quota_);
  for (int i = 0; i < 500; ++i) {
    // gRPC closes its descriptor without Remove().
    const auto admitted = connections.Admit(accepted_, Client(1000, i + 1));
    ASSERT_TRUE(admitted.ok()) << admitted.status();
    EXPECT_LT(admitted->for_grpc.get(), 300);
    EXPECT_EQ(connections.Find(Name(admitted->for_grpc))->pid, i + 1);
  }
}

TEST_F(ConnectionsTest, LateRemoveKeepsTheNewConnection) {
  DescriptorLimit few(300);
  Connections connections(&quota_);
  auto first = connections.Admit(accepted_, Client(1000, 1));
  ASSERT_TRUE(first.ok());
  const std::string name = Name(first->for_grpc);
  const std::uint64_t old_id = first->id;
  first->for_grpc.reset();
  std::uint64_t id = 0;
  for (pid_t pid = 2; id == 0 && pid < 1000; ++pid) {
    const auto next = connections.Admit(accepted_, Client(1000, pid));
    ASSERT_TRUE(next.ok());
    if (Name(next->for_grpc) == name) id = next->id;
  }
  ASSERT_NE(id, 0u);
  connections.Remove(old_id);
  EXPECT_TRUE(connections.Find(name).has_value());
  connections.Remove(id);
  EXPECT_FALSE(connections.Find(name).has_value());
}

TEST_F(ConnectionsTest, EachUsersConnectionsAreBounded) {
  std::vector<std::uint64_t> ids;
  for (std::size_t i = 0; i < Connections::kPerUser; ++i) {
    const auto admitted = connections_.Admit(accepted_, Client(1000));
    ASSERT_TRUE(admitted.ok()) << admitted.status();
    ids.push_back(admitted->id);
  }
  const absl::Status refused = connections_.Admit(accepted_, Client(1000)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("user 1000 has 1024 connections"), std::string::npos) << refused;
  EXPECT_TRUE(connections_.Admit(accepted_, Client(1001)).ok());
  connections_.Remove(ids[500]);
  EXPECT_TRUE(connections_.Admit(accepted_, Client(1000)).ok());
  EXPECT_FALSE(connections_.Admit(accepted_, Client(1000)).ok());
}

TEST_F(ConnectionsTest, EachUsersDescriptorsAreBounded) {
  DescriptorQuota quota(2 * Connections::kDescriptors);
  Connections connections(&quota);
  auto first = connections.Admit(accepted_, Client(1000));
  const auto second = connections.Admit(accepted_, Client(1000));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(connections.Count(Tenant(1000)), 2u);
  EXPECT_EQ(connections.Admit(accepted_, Client(1000)).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(connections.Admit(accepted_, Client(1001)).ok());
  connections.Remove(first->id);
  EXPECT_EQ(connections.Count(Tenant(1000)), 1u);
  EXPECT_FALSE(connections.Admit(accepted_, Client(1000)).ok()) << "gRPC has its descriptor yet";
  first->quota.reset();
  EXPECT_TRUE(connections.Admit(accepted_, Client(1000)).ok());
}

TEST_F(ConnectionsTest, ShowsWhatEachUserHasAndWasRefused) {
  const auto admitted = connections_.Admit(accepted_, Client(1000));
  ASSERT_TRUE(admitted.ok());
  connections_.CountRefused(Tenant(1000));
  connections_.CountRefused(Tenant(1001));
  connections_.CountRefused(Tenant(1001));
  auto users = connections_.Users();
  ASSERT_EQ(users.size(), 2u);
  EXPECT_EQ(users[Tenant(1000)].open, 1u);
  EXPECT_EQ(users[Tenant(1000)].refused, 1u);
  EXPECT_EQ(users[Tenant(1001)].open, 0u);
  EXPECT_EQ(users[Tenant(1001)].refused, 2u);
  connections_.Remove(admitted->id);
  users = connections_.Users();
  EXPECT_EQ(users[Tenant(1000)].open, 0u);
  EXPECT_EQ(users[Tenant(1000)].refused, 1u) << "counted since the start";
}

// Each pod and each subordinate id is a user.
TEST_F(ConnectionsTest, RefusedUsersAreBounded) {
  const auto admitted = connections_.Admit(accepted_, Client(1000));
  ASSERT_TRUE(admitted.ok());
  for (uid_t user = 1000; user < 1000 + 3 * Connections::kMostRefusedUsers; ++user) {
    connections_.CountRefused(Tenant(user));
  }
  auto users = connections_.Users();
  EXPECT_LE(users.size(), Connections::kMostRefusedUsers);
  EXPECT_EQ(users[Tenant(1000)].refused, 1u) << "this user has a connection";
}

TEST_F(ConnectionsTest, ConnectionWithoutADescriptorIsRefused) {
  {
    // No more than are open already.
    const int next = fcntl(accepted_.get(), F_DUPFD_CLOEXEC, 0);
    ASSERT_GE(next, 0);
    close(next);
    DescriptorLimit none(static_cast<rlim_t>(next));
    EXPECT_EQ(connections_.Admit(accepted_, Client(1000)).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
  EXPECT_TRUE(connections_.Admit(accepted_, Client(1000)).ok());
}

}  // namespace
}  // namespace gradsync::daemon
