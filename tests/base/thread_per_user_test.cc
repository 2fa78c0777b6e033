#include "daemon/base/thread_per_user.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kit/gate.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kAlice(1000), kBob(1001), kCarol(1002);

// Sets `*ended` when the calling thread ends.
void NoteEndOfThread(std::atomic<bool>* ended) {
  // Destroyed when the thread ends.
  struct Mark {
    std::atomic<bool>* ended = nullptr;
    ~Mark() {
      if (ended != nullptr) *ended = true;
    }
  };
  thread_local Mark mark;
  mark.ended = ended;
}

TEST(ThreadPerUserTest, RunsAUsersWorkInOrderAndOneAtATime) {
  std::vector<int> order;  // no lock: only one piece runs at a time
  {
    ThreadPerUser threads;
    for (int i = 0; i < 1000; ++i) {
      ASSERT_TRUE(threads.Run(kAlice, [&, i] { order.push_back(i); }).ok());
    }
  }
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(ThreadPerUserTest, WorkThatDoesNotEndDelaysNoOtherUser) {
  Gate gate, done;
  ThreadPerUser threads;
  for (const Tenant& user : {kAlice, kBob}) {
    ASSERT_TRUE(threads.Run(user, [&] { gate.Wait(); }).ok());
  }
  ASSERT_TRUE(threads.Run(kCarol, [&] { done.Open(); }).ok());
  done.Wait();  // for ever, if two users can hold all threads
  gate.Open();
}

TEST(ThreadPerUserTest, ThreadEndsWhenItsUserHasNoWork) {
  // Not even a moment's patience: each piece may get a thread of its own.
  ThreadPerUser threads{std::chrono::milliseconds(0)};
  Gate one, two;
  std::atomic<bool> ended{false};
  ASSERT_TRUE(threads
                  .Run(kAlice,
                       [&] {
                         NoteEndOfThread(&ended);
                         one.Open();
                       })
                  .ok());
  one.Wait();
  while (!ended) std::this_thread::yield();
  ASSERT_TRUE(threads.Run(kAlice, [&] { two.Open(); }).ok());
  two.Wait();
}

TEST(ThreadPerUserTest, KeptThreadStaysWithoutWorkUntilItIsReleased) {
  std::atomic<bool> alices_ended{false};
  ThreadPerUser threads{std::chrono::milliseconds(0)};
  ASSERT_TRUE(threads.Keep(kAlice).ok());
  for (int i = 0; i < 3; ++i) {
    Gate ran;
    ASSERT_TRUE(threads
                    .Run(kAlice,
                         [&] {
                           NoteEndOfThread(&alices_ended);
                           ran.Open();
                         })
                    .ok());
    ran.Wait();
    // Bob's thread is not kept. Hers would end as soon.
    std::atomic<bool> bobs_ended{false};
    ASSERT_TRUE(threads.Run(kBob, [&] { NoteEndOfThread(&bobs_ended); }).ok());
    while (!bobs_ended) std::this_thread::yield();
    EXPECT_FALSE(alices_ended);
  }
  threads.Release(kAlice);
  while (!alices_ended) std::this_thread::yield();
  Gate again;
  ASSERT_TRUE(threads.Run(kAlice, [&] { again.Open(); }).ok());
  again.Wait();
}

TEST(ThreadPerUserTest, DestructorEndsAKeptThread) {
  std::atomic<int> ran{0};
  {
    ThreadPerUser threads;
    ASSERT_TRUE(threads.Keep(kAlice).ok());
    ASSERT_TRUE(threads.Run(kAlice, [&] { ++ran; }).ok());
  }
  EXPECT_EQ(ran, 1);
}

TEST(ThreadPerUserTest, DestructorRunsAllWork) {
  std::atomic<int> ran{0};
  {
    Gate gate;
    ThreadPerUser threads;
    ASSERT_TRUE(threads.Run(kAlice, [&] { gate.Wait(); }).ok());
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(threads.Run(kAlice, [&] { ++ran; }).ok());
    gate.Open();
  }
  EXPECT_EQ(ran, 10);
}

TEST(ThreadPerUserTest, WorkIsDestroyedBeforeTheUsersNextRuns) {
  ThreadPerUser threads;
  Gate done;
  auto held = std::make_shared<int>(7);
  const std::weak_ptr<int> watched = held;
  std::optional<bool> expired;
  ASSERT_TRUE(threads.Run(kAlice, [released = std::move(held)] {}).ok());
  ASSERT_TRUE(threads
                  .Run(kAlice,
                       [&] {
                         expired = watched.expired();
                         done.Open();
                       })
                  .ok());
  done.Wait();
  EXPECT_EQ(expired, true);
}

TEST(ThreadPerUserTest, WorkOfManyThreadsAndUsersRuns) {
  std::atomic<int> ran{0};
  {
    ThreadPerUser threads{std::chrono::milliseconds(0)};
    std::vector<std::thread> callers;
    for (uid_t t = 0; t < 4; ++t) {
      callers.emplace_back([&, t] {
        for (uid_t i = 0; i < 200; ++i) {
          while (!threads.Run(Tenant((t + i) % 5), [&] { ++ran; }).ok()) {
          }
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  EXPECT_EQ(ran, 800);
}

}  // namespace
}  // namespace gradsync::daemon
