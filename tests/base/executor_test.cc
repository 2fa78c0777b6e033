#include "daemon/base/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kit/gate.h"

namespace gradsync::daemon {
namespace {

TEST(SerialExecutorTest, RunsInOrderOnOneThread) {
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  {
    SerialExecutor executor;
    for (int i = 0; i < 1000; ++i) {
      executor.Run([&, i] {
        order.push_back(i);
        threads.push_back(std::this_thread::get_id());
      });
    }
  }
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
    EXPECT_EQ(threads[static_cast<std::size_t>(i)], threads[0]);
  }
  EXPECT_NE(threads[0], std::this_thread::get_id());
}

TEST(SerialExecutorTest, RunReturnsBeforeTheWorkEnds) {
  Gate gate, done;
  SerialExecutor executor;
  executor.Run([&] { gate.Wait(); });
  executor.Run([&] { done.Open(); });
  gate.Open();  // not reached if Run() waits
  done.Wait();
}

TEST(SerialExecutorTest, WorkAddedByWorkRunsLater) {
  std::vector<int> order;
  {
    SerialExecutor executor;
    executor.Run([&] {
      executor.Run([&] { order.push_back(2); });
      order.push_back(1);
    });
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(SerialExecutorTest, DestructorRunsAllQueuedWork) {
  int ran = 0;
  {
    Gate gate;
    SerialExecutor executor;
    executor.Run([&] { gate.Wait(); });
    for (int i = 0; i < 10; ++i) {
      executor.Run([&] {
        ++ran;
        executor.Run([&] { ++ran; });
      });
    }
    gate.Open();
  }
  EXPECT_EQ(ran, 20);
}

TEST(SerialExecutorTest, WorkIsDestroyedBeforeTheNextRuns) {
  SerialExecutor executor;
  Gate done;
  auto held = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = held;
  std::optional<bool> expired;
  executor.Run([released = std::move(held)] {});
  executor.Run([&] {
    expired = watched.expired();
    done.Open();
  });
  done.Wait();
  EXPECT_EQ(expired, true);
}

TEST(SerialExecutorTest, WorkOfManyThreadsRunsOneAtATime) {
  int ran = 0;  // no lock: only the executor uses it
  {
    SerialExecutor executor;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) executor.Run([&] { ++ran; });
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(ran, 4000);
}

TEST(ConcurrentExecutorTest, WorkRunsConcurrently) {
  Gate gate, done;
  ConcurrentExecutor executor(2);
  executor.Run([&] { gate.Wait(); });
  executor.Run([&] { done.Open(); });
  done.Wait();
  gate.Open();
}

TEST(ConcurrentExecutorTest, HasNoMoreThreadsThanItMay) {
  std::atomic<int> running{0};
  std::atomic<int> ran{0};
  {
    Gate gate, both;
    ConcurrentExecutor executor(2);
    for (int i = 0; i < 20; ++i) {
      executor.Run([&] {
        if (++running == 2) both.Open();
        EXPECT_LE(running, 2);
        gate.Wait();
        --running;
        ++ran;
      });
    }
    both.Wait();
    gate.Open();
  }
  EXPECT_EQ(ran, 20);
}

TEST(ConcurrentExecutorTest, DestructorWaitsForAllWork) {
  std::atomic<int> ran{0};
  {
    Gate gate;
    ConcurrentExecutor executor(10);
    for (int i = 0; i < 10; ++i) {
      executor.Run([&] {
        gate.Wait();
        ++ran;
        executor.Run([&] { ++ran; });
      });
    }
    EXPECT_EQ(ran, 0);
    gate.Open();
  }
  EXPECT_EQ(ran, 20);
}

}  // namespace
}  // namespace gradsync::daemon
