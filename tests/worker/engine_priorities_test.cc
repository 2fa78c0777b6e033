#include "daemon/worker/engine_priorities.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "daemon/base/tenant.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kUser(1);

// Engines of some users.
class Engines {
 public:
  explicit Engines(int daemon_nice)
      : priorities_(daemon_nice, &clock_), daemon_nice_(daemon_nice) {}

  // Each begins to work at once.
  void Start(const Tenant& user, std::size_t count = 1) {
    for (; count > 0; --count) {
      const std::size_t at = nice_.size();
      nice_.push_back(daemon_nice_);
      engines_.push_back(std::make_unique<EnginePriorities::Engine>(
          &priorities_, user, [this, at](int nice) { nice_[at] = nice; }));
      Work(at);
    }
  }
  void Work(std::size_t engine) { engines_[engine]->Work(); }
  void End(std::size_t engine) { engines_[engine] = nullptr; }
  void Advance(std::uint64_t ns) { clock_.Advance(ns); }
  // The nice values of all engines, in the order of their starts; an engine that has ended keeps
  // its last one.
  const std::vector<int>& nice() const { return nice_; }

 private:
  ManualClock clock_;
  EnginePriorities priorities_;
  const int daemon_nice_;
  std::vector<int> nice_;
  std::vector<std::unique_ptr<EnginePriorities::Engine>> engines_;
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

TEST(EnginePriorities, EngineThatEndsLeavesItsShareToTheOthers) {
  Engines engines(0);
  engines.Start(kUser, 3);
  engines.End(1);
  EXPECT_EQ(engines.nice(), (std::vector<int>{3, 5, 3}));
  engines.End(0);
  EXPECT_EQ(engines.nice(), (std::vector<int>{3, 5, 0}));
  engines.End(2);
  engines.Start(kUser);
  EXPECT_EQ(engines.nice().back(), 0);
}

// An engine lives for minutes after its job.
TEST(EnginePriorities, EngineThatRestsLeavesItsShareToTheOthers) {
  Engines engines(0);
  engines.Start(kUser, 2);
  engines.Advance(EnginePriorities::kRestNs - 1);
  engines.Work(0);
  EXPECT_EQ(engines.nice(), (std::vector<int>{3, 3}));
  engines.Advance(EnginePriorities::kLookNs);
  engines.Work(0);
  EXPECT_EQ(engines.nice(), (std::vector<int>{0, 3}));
  engines.Work(1);
  EXPECT_EQ(engines.nice(), (std::vector<int>{3, 3}));
}

TEST(EnginePriorities, EngineThatHasNotWorkedHasNoShare) {
  EnginePriorities priorities(0, nullptr);
  int nice = 0;
  EnginePriorities::Engine works(&priorities, kUser, [&nice](int value) { nice = value; });
  const EnginePriorities::Engine rests(&priorities, kUser, [](int) { FAIL() << "it rests"; });
  works.Work();
  EXPECT_EQ(nice, 0);
}

TEST(EnginePriorities, NoneIsAboveTheHighestNiceValue) {
  Engines engines(10);
  engines.Start(kUser, 64);
  EXPECT_EQ(engines.nice(), std::vector<int>(64, 19));
}

TEST(EnginePriorities, EnginesWorkAndEndOnAnyThread) {
  ManualClock clock;
  EnginePriorities priorities(0, &clock);
  std::atomic<int> calls{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        EnginePriorities::Engine engine(&priorities, kUser, [&calls](int) { ++calls; });
        engine.Work();
        clock.Advance(EnginePriorities::kLookNs);
        engine.Work();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int nice = 0;  // the daemon's
  EnginePriorities::Engine last(&priorities, kUser, [&nice](int value) { nice = value; });
  last.Work();
  EXPECT_EQ(nice, 0) << "the others have ended";
}

}  // namespace
}  // namespace gradsync::daemon
