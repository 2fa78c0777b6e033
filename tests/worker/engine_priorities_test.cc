#include "daemon/worker/engine_priorities.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kUser(1);

// Engines of some users. The daemon's own nice value is given.
class Engines {
 public:
  explicit Engines(int daemon_nice) : priorities_(daemon_nice) {}

  void Start(const Tenant& user) {
    nice_.push_back(kUnset);
    members_.push_back(std::make_unique<EnginePriorities::Member>(
        &priorities_, user, [this, at = nice_.size() - 1](int nice) { nice_[at] = nice; }));
  }
  void End(std::size_t engine) {
    members_[engine] = nullptr;
    nice_[engine] = kUnset;
  }
  // Of each engine in the order of their starts.
  const std::vector<int>& nice() const { return nice_; }

  static constexpr int kUnset = 100;

 private:
  EnginePriorities priorities_;
  std::vector<int> nice_;
  std::vector<std::unique_ptr<EnginePriorities::Member>> members_;
};

TEST(EnginePriorities, OnlyEngineHasTheDaemonsPriority) {
  Engines engines(-10);
  engines.Start(kUser);
  EXPECT_EQ(engines.nice(), (std::vector<int>{-10}));
}

// The kernel's weights are 1024 at 0, 526 at 3, 335 at 5, 272 at 6, 137 at 9.
TEST(EnginePriorities, UsersEnginesShareTheWeightOfOne) {
  const std::vector<int> expected = {0, 3, 5, 6, 7, 8, 9, 9};
  Engines engines(0);
  for (std::size_t count = 1; count <= expected.size(); ++count) {
    engines.Start(kUser);
    EXPECT_EQ(engines.nice(), std::vector<int>(count, expected[count - 1]));
  }
}

TEST(EnginePriorities, OtherUsersEnginesKeepTheirs) {
  Engines engines(0);
  engines.Start(kUser);
  engines.Start(Tenant(2));
  engines.Start(kUser);
  EXPECT_EQ(engines.nice(), (std::vector<int>{3, 0, 3}));
}

TEST(EnginePriorities, RemainingEnginesGetTheShareOfAnEndedOne) {
  Engines engines(0);
  for (int i = 0; i < 3; ++i) engines.Start(kUser);
  engines.End(1);
  EXPECT_EQ(engines.nice(), (std::vector<int>{3, Engines::kUnset, 3}));
  engines.End(0);
  EXPECT_EQ(engines.nice(), (std::vector<int>{Engines::kUnset, Engines::kUnset, 0}));
  engines.End(2);
  engines.Start(kUser);
  EXPECT_EQ(engines.nice().back(), 0);
}

TEST(EnginePriorities, NoneIsAboveTheHighestNiceValue) {
  Engines engines(10);
  for (int i = 0; i < 64; ++i) engines.Start(kUser);
  EXPECT_EQ(engines.nice(), std::vector<int>(64, 19));
}

}  // namespace
}  // namespace gradsync::daemon
