#include "daemon/base/fair_executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kit/gate.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kAlice(1000), kBob(1001);

TEST(FairExecutorTest, RunsAUsersWorkInOrderAndOneAtATime) {
  std::vector<int> order;  // no lock: only one piece runs at a time
  {
    FairExecutor executor(4);
    for (int i = 0; i < 1000; ++i) executor.Run(kAlice, [&, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(FairExecutorTest, RunReturnsBeforeTheWorkEnds) {
  Gate gate, done;
  FairExecutor executor(1);
  executor.Run(kAlice, [&] { gate.Wait(); });
  executor.Run(kAlice, [&] { done.Open(); });
  gate.Open();  // not reached if Run() waits
  done.Wait();
}

TEST(FairExecutorTest, OneUsersLongWorkLeavesAThreadToTheOthers) {
  Gate gate, done;
  FairExecutor executor(2);
  for (int i = 0; i < 3; ++i) executor.Run(kAlice, [&] { gate.Wait(); });
  executor.Run(kBob, [&] { done.Open(); });
  done.Wait();  // for ever, if both threads serve the first user
  gate.Open();
}

TEST(FairExecutorTest, UsersTakeTurns) {
  std::string order;  // no lock: there is one thread
  {
    Gate gate;
    FairExecutor executor(1);
    executor.Run(kAlice, [&] { gate.Wait(); });
    for (int i = 0; i < 3; ++i) executor.Run(kAlice, [&] { order += 'a'; });
    for (int i = 0; i < 2; ++i) executor.Run(kBob, [&] { order += 'b'; });
    gate.Open();
  }
  EXPECT_EQ(order, "babaa");
}

TEST(FairExecutorTest, PodsOfOneUserTakeTurns) {
  const Tenant a(1000, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60"));
  const Tenant b(1000, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f61"));
  std::string order;  // no lock: there is one thread
  {
    Gate gate;
    FairExecutor executor(1);
    executor.Run(kBob, [&] { gate.Wait(); });
    for (int i = 0; i < 3; ++i) executor.Run(a, [&] { order += 'a'; });
    for (int i = 0; i < 2; ++i) executor.Run(b, [&] { order += 'b'; });
    gate.Open();
  }
  EXPECT_EQ(order, "ababa");
}

TEST(FairExecutorTest, DestructorRunsAllQueuedWork) {
  int ran = 0;
  {
    Gate gate;
    FairExecutor executor(1);
    executor.Run(kAlice, [&] { gate.Wait(); });
    for (int i = 0; i < 10; ++i) {
      executor.Run(kAlice, [&] {
        ++ran;
        executor.Run(kBob, [&] { ++ran; });
      });
    }
    gate.Open();
  }
  EXPECT_EQ(ran, 20);
}

TEST(FairExecutorTest, WorkIsDestroyedBeforeTheUsersNextRuns) {
  FairExecutor executor(2);
  Gate done;
  auto held = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = held;
  std::optional<bool> expired;
  executor.Run(kAlice, [released = std::move(held)] {});
  executor.Run(kAlice, [&] {
    expired = watched.expired();
    done.Open();
  });
  done.Wait();
  EXPECT_EQ(expired, true);
}

TEST(FairExecutorTest, AUserRestsAfterEachPieceAndOthersRunMeanwhile) {
  constexpr int kRest = 3;
  constexpr auto kWork = std::chrono::milliseconds(20);
  std::string order;  // no lock: there is one thread
  std::chrono::steady_clock::time_point ended, next;
  Gate gate, done;
  FairExecutor executor(1, kRest);
  executor.Run(kAlice, [&] {
    gate.Wait();
    const auto until = std::chrono::steady_clock::now() + kWork;
    while (std::chrono::steady_clock::now() < until) {
    }
    ended = until;
  });
  executor.Run(kAlice, [&] {
    next = std::chrono::steady_clock::now();
    order += 'a';
    done.Open();
  });
  executor.Run(kBob, [&] { order += 'b'; });
  gate.Open();
  done.Wait();
  EXPECT_EQ(order, "ba");
  EXPECT_GE(next - ended, kRest * kWork);
}

TEST(FairExecutorTest, DestructorWaitsForNoRest) {
  int ran = 0;
  {
    FairExecutor executor(2, /*rest=*/1'000'000'000);
    for (int i = 0; i < 3; ++i) executor.Run(kAlice, [&] { ++ran; });
  }
  EXPECT_EQ(ran, 3);
}

TEST(FairExecutorTest, AUserThatHasRestedRunsAgain) {
  Gate first, second;
  FairExecutor executor(2, /*rest=*/1);
  executor.Run(kAlice, [&] { first.Open(); });
  first.Wait();
  executor.Run(kAlice, [&] { second.Open(); });
  second.Wait();
}

TEST(FairExecutorTest, WorkOfManyThreadsAndUsersRuns) {
  for (const int rest : {0, 1}) {
    std::atomic<int> ran{0};
    {
      FairExecutor executor(3, rest);
      std::vector<std::thread> threads;
      for (uid_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
          for (uid_t i = 0; i < 1000; ++i) executor.Run(Tenant((t + i) % 5), [&] { ++ran; });
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    EXPECT_EQ(ran, 4000) << "rest " << rest;
  }
}

}  // namespace
}  // namespace gradsync::daemon
