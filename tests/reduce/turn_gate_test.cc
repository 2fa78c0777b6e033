#include "daemon/reduce/turn_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/tenant.h"
#include "daemon/reduce/user_shares.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kPlug(9);
constexpr std::uint64_t kBytes = 1000;

// Threads that wait at a gate of one turn, in the order in which they were added.
class Queue {
 public:
  Queue() { plug_ = std::make_unique<TurnGate::Turn>(&plug_client_, kBytes); }
  ~Queue() { Finish(); }

  // A thread of the user that notes its name in its turn, which takes so long.
  void Add(const std::string& name, std::uint32_t user, std::uint64_t bytes = kBytes,
           std::uint64_t ns = 0) {
    clients_.push_back(std::make_unique<TurnGate::Client>(&gate_, Tenant(user)));
    const std::size_t before = gate_.waiting();
    threads_.emplace_back([this, client = clients_.back().get(), name, bytes, ns] {
      const TurnGate::Turn turn(client, bytes);
      const std::lock_guard<std::mutex> lock(mutex_);
      order_.push_back(turn.given() ? name : name + " got none");
      clock_.Advance(ns);
    });
    EXPECT_TRUE(Soon([&] { return gate_.waiting() == before + 1; }));
  }
  void Close(std::size_t thread) { clients_[thread]->Close(); }
  void Join(std::size_t thread) { threads_[thread].join(); }
  // Lets them all pass, and returns their names.
  std::vector<std::string> Finish() {
    plug_ = nullptr;
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    return order_;
  }
  const TurnGate& gate() const { return gate_; }

 private:
  ManualClock clock_;
  TurnGate gate_{1, &clock_};
  TurnGate::Client plug_client_{&gate_, kPlug};
  std::unique_ptr<TurnGate::Turn> plug_;
  std::vector<std::unique_ptr<TurnGate::Client>> clients_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::vector<std::string> order_;
};

using Names = std::vector<std::string>;

TEST(TurnGateTest, AUsersThreadsPassInTheirOrder) {
  Queue queue;
  for (const char* const name : {"a1", "a2", "a3"}) queue.Add(name, 1);
  EXPECT_EQ(queue.Finish(), (Names{"a1", "a2", "a3"}));
}

TEST(TurnGateTest, UsersTakeTurnsHoweverManyThreadsTheyHave) {
  Queue queue;
  for (const char* const name : {"a1", "a2", "a3", "a4"}) queue.Add(name, 1);
  for (const char* const name : {"b1", "b2"}) queue.Add(name, 2);
  EXPECT_EQ(queue.Finish(), (Names{"a1", "b1", "a2", "b2", "a3", "a4"}));
}

TEST(TurnGateTest, TurnsAreCountedInBytes) {
  Queue queue;
  for (const char* const name : {"A1", "A2"}) queue.Add(name, 1, 2 * kBytes);
  for (const char* const name : {"b1", "b2", "b3", "b4"}) queue.Add(name, 2);
  EXPECT_EQ(queue.Finish(), (Names{"A1", "b1", "b2", "A2", "b3", "b4"}));
}

TEST(TurnGateTest, SlowTurnsCountForTheirTime) {
  Queue queue;
  queue.Add("a1", 1, kBytes, /*ns=*/1'000'000'000);
  queue.Add("a2", 1);
  Names expected = {"a1"};
  for (std::uint64_t i = 1; i <= UserShares::kMostTimes + 1; ++i) {
    const std::string name = "b" + std::to_string(i);
    queue.Add(name, 2);
    expected.push_back(name);
  }
  expected.insert(expected.end() - 1, "a2");
  EXPECT_EQ(queue.Finish(), expected);
}

// The waits of an engine whose process has ended, while others use the gate.
TEST(TurnGateTest, AClosedClientWaitsNoMoreAndGetsNoTurn) {
  Queue queue;
  queue.Add("a", 1);
  queue.Add("b", 2);
  queue.Close(0);
  queue.Join(0);
  EXPECT_EQ(queue.gate().waiting(), 1u);
  EXPECT_EQ(queue.Finish(), (Names{"a got none", "b"}));
}

TEST(TurnGateTest, AClosedClientGetsNoTurnAtAFreeGate) {
  TurnGate gate(1);
  TurnGate::Client closed(&gate, Tenant(1));
  closed.Close();
  EXPECT_FALSE(TurnGate::Turn(&closed, kBytes).given());
  TurnGate::Client other(&gate, Tenant(1));
  EXPECT_TRUE(TurnGate::Turn(&other, kBytes).given());
}

TEST(TurnGateTest, ATurnThatHasBegunGoesOnWhenItsClientIsClosed) {
  TurnGate gate(1);
  TurnGate::Client client(&gate, Tenant(1));
  {
    const TurnGate::Turn turn(&client, kBytes);
    client.Close();
    EXPECT_TRUE(turn.given());
  }
  TurnGate::Client other(&gate, Tenant(2));
  EXPECT_TRUE(TurnGate::Turn(&other, kBytes).given()) << "its place is free again";
}

TEST(TurnGateTest, WithoutAGateEveryTurnBeginsAtOnce) {
  TurnGate::Client client(nullptr, Tenant(1));
  const TurnGate::Turn first(&client, kBytes), second(&client, kBytes);
  EXPECT_TRUE(first.given() && second.given());
  client.Close();
}

TEST(TurnGateTest, AsManyHaveATurnAsMay) {
  constexpr int kAtOnce = 3, kThreads = 8, kTurns = 500;
  TurnGate gate(kAtOnce);
  std::atomic<int> now{0}, most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      TurnGate::Client client(&gate, Tenant(static_cast<uid_t>(i % 3)));
      for (int turns = 0; turns < kTurns; ++turns) {
        const TurnGate::Turn turn(&client, kBytes);
        const int count = ++now;
        int seen = most.load();
        while (count > seen && !most.compare_exchange_weak(seen, count)) {
        }
        std::this_thread::yield();
        --now;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, kAtOnce);
  EXPECT_EQ(gate.waiting(), 0u);
}

}  // namespace
}  // namespace gradsync::daemon
