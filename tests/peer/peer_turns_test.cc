// Which thread handles a message between nodes.

#include "daemon/peer/peer_turns.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "daemon/base/fair_executor.h"
#include "gtest/gtest.h"
#include "tests/job/manual_executor.h"
#include "tests/kit/gate.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kAlice(1000), kBob(1001), kCarol(1002), kDave(1003);
constexpr std::uint64_t kMicrosecond = 1000;
constexpr std::uint64_t kMillisecond = 1'000'000;

class PeerTurnsTest : public testing::Test {
 protected:
  // A message that takes so long. True: it was handled at once.
  bool Handle(const std::shared_ptr<UserTurns>& turns, MessageWeight weight,
              std::uint64_t takes_ns = 0) {
    const auto handled = std::make_shared<bool>(false);
    turns->Add(clock_.NowNs(), weight, [this, handled, takes_ns](bool) {
      clock_.Advance(takes_ns);
      *handled = true;
    });
    return *handled;
  }

  ManualClock clock_;
  ManualExecutor executor_;
  PeerTurns turns_{&clock_, &executor_};
  std::shared_ptr<UserTurns> alice_ = turns_.Of(kAlice);
  std::shared_ptr<UserTurns> bob_ = turns_.Of(kBob);
};

TEST_F(PeerTurnsTest, ALightMessageIsHandledAtOnce) {
  EXPECT_TRUE(Handle(alice_, MessageWeight::kLight));
  EXPECT_EQ(executor_.pending(), 0u);
}

TEST_F(PeerTurnsTest, AHeavyMessageHasATurn) {
  std::string order;
  alice_->Add(clock_.NowNs(), MessageWeight::kHeavy, [&](bool drop) { order += drop ? 'd' : 'h'; });
  alice_->Add(clock_.NowNs(), MessageWeight::kLight, [&](bool) { order += 'l'; });
  EXPECT_EQ(order, "l") << "of another stream";
  executor_.RunAll();
  EXPECT_EQ(order, "lh");
}

TEST_F(PeerTurnsTest, AUserWhoHasUsedMuchHasTurnsForAWhile) {
  EXPECT_TRUE(Handle(alice_, MessageWeight::kLight, 20 * kMillisecond));
  EXPECT_FALSE(Handle(alice_, MessageWeight::kLight));
  EXPECT_TRUE(Handle(bob_, MessageWeight::kLight)) << "another user";
  EXPECT_TRUE(Handle(alice_, MessageWeight::kUrgent)) << "a ping";
  clock_.Advance(20 * kMillisecond);
  EXPECT_TRUE(Handle(alice_, MessageWeight::kLight));
}

// Such a message is parsed before anybody knows that it needs a turn.
TEST_F(PeerTurnsTest, TheTimeToParseCountsForAMessageThatHasATurn) {
  EXPECT_TRUE(alice_->HasShare(clock_.NowNs()));
  const std::uint64_t begin_ns = clock_.NowNs();
  clock_.Advance(20 * kMillisecond);
  alice_->Add(begin_ns, MessageWeight::kHeavy, [](bool) {});
  EXPECT_FALSE(alice_->HasShare(clock_.NowNs()));
  EXPECT_FALSE(Handle(alice_, MessageWeight::kLight));
  EXPECT_TRUE(bob_->HasShare(clock_.NowNs())) << "another user";
  clock_.Advance(20 * kMillisecond);
  EXPECT_TRUE(alice_->HasShare(clock_.NowNs()));
}

TEST_F(PeerTurnsTest, ManyStreamsOfAUserUseAShareTogether) {
  // As if they were handled at the same time, on several threads.
  int at_once = 0;
  while (at_once < 10'000 && Handle(turns_.Of(kAlice), MessageWeight::kLight)) ++at_once;
  EXPECT_EQ(at_once, static_cast<int>(PeerTurns::kBurstNs / PeerTurns::kReadNs) + 1);
  EXPECT_TRUE(Handle(turns_.Of(kBob), MessageWeight::kLight));
}

TEST_F(PeerTurnsTest, StepsOfSmallMessagesNeverHaveTurns) {
  for (int step = 0; step < 10'000; ++step) {
    for (int message = 0; message < 20; ++message) {
      ASSERT_TRUE(Handle(alice_, MessageWeight::kLight, 5 * kMicrosecond)) << step;
    }
    clock_.Advance(400 * kMicrosecond);
  }
}

// Another node may name any user.
TEST_F(PeerTurnsTest, TheUsersOfAnAddressShareItsTurns) {
  const auto address = turns_.OfAddress("10.0.0.1", "10.0.0.1");
  std::string order;
  const auto add = [&](const std::shared_ptr<UserTurns>& user, char name,
                       const std::shared_ptr<AddressTurns>& from) {
    user->Add(
        clock_.NowNs(), MessageWeight::kHeavy, [&order, name](bool) { order += name; }, from);
  };
  for (int i = 0; i < 3; ++i) add(alice_, 'a', address);
  add(bob_, 'b', turns_.OfAddress("10.0.0.1", "10.0.0.1"));
  executor_.RunAll();
  EXPECT_EQ(order, "aaba");
}

TEST_F(PeerTurnsTest, TheAddressesOfAUserShareItsTurns) {
  std::string order;
  const auto add = [&](char name, const std::string& address) {
    alice_->Add(
        clock_.NowNs(), MessageWeight::kHeavy, [&order, name](bool) { order += name; },
        turns_.OfAddress(address, address));
  };
  for (int i = 0; i < 3; ++i) add('1', "10.0.0.1");
  add('2', "10.0.0.2");
  executor_.RunAll();
  EXPECT_EQ(order, "1121");
}

// Two threads, and messages that wait at a gate.
class TwoTurnThreadsTest : public testing::Test {
 protected:
  ~TwoTurnThreadsTest() override {
    gate_.Open();
    executor_.reset();  // what waits there uses the turns
    EXPECT_EQ(handled_, added_);
  }
  void Add(uid_t user, const std::string& address, std::function<void()> handle) {
    ++added_;
    turns_.Of(Tenant(user))
        ->Add(
            clock_.NowNs(), MessageWeight::kHeavy,
            [this, handle = std::move(handle)](bool) {
              handle();
              ++handled_;
            },
            turns_.OfAddress(address, address));
  }

  ManualClock clock_;
  Gate gate_, other_;
  std::atomic<int> handled_{0};
  int added_ = 0;
  std::unique_ptr<FairExecutor> executor_ = std::make_unique<FairExecutor>(/*threads=*/2);
  PeerTurns turns_{&clock_, executor_.get()};
};

TEST_F(TwoTurnThreadsTest, OneMessageOfAnAddressHasATurnAtATime) {
  for (uid_t user = 1; user <= 10; ++user) Add(user, "10.0.0.1", [this] { gate_.Wait(); });
  Add(11, "10.0.0.2", [this] { other_.Open(); });
  other_.Wait();  // for ever, if the first address has all threads
}

TEST_F(TwoTurnThreadsTest, OneMessageOfAUserHasATurnAtATime) {
  for (int node = 1; node <= 8; ++node) {
    Add(1, "10.0.0." + std::to_string(node), [this] { gate_.Wait(); });
  }
  Add(2, "10.0.0.9", [this] { other_.Open(); });
  other_.Wait();
}

// Its other users do not wait for a user whose message from elsewhere runs.
TEST_F(TwoTurnThreadsTest, AnAddressDoesNotWaitForAUserThatRunsElsewhere) {
  Gate runs;
  Add(1, "10.0.0.1", [&] {
    runs.Open();
    gate_.Wait();
  });
  runs.Wait();
  Add(1, "10.0.0.2", [] {});
  Add(2, "10.0.0.2", [this] { other_.Open(); });
  other_.Wait();
}

TEST_F(PeerTurnsTest, AnAddressHasAShareWhateverUsersItNames) {
  const auto address = turns_.OfAddress("10.0.0.1", "10.0.0.1");
  const auto handle = [&](uid_t user, const std::shared_ptr<AddressTurns>& from) {
    bool handled = false;
    turns_.Of(Tenant(user))
        ->Add(
            clock_.NowNs(), MessageWeight::kLight, [&](bool) { handled = true; }, from);
    executor_.RunAll();
    return handled;
  };
  const auto at_once = [&](uid_t user, const std::shared_ptr<AddressTurns>& from) {
    const bool share = from->HasShare(clock_.NowNs());
    return handle(user, from) && share;
  };
  uid_t user = 1;
  while (user < 10'000 && at_once(user, address)) ++user;
  EXPECT_EQ(user, PeerTurns::kBurstNs / PeerTurns::kReadNs + 2);
  EXPECT_TRUE(at_once(user, turns_.OfAddress("10.0.0.2", "10.0.0.2")));
  clock_.Advance(20 * kMillisecond);
  EXPECT_TRUE(at_once(user, address));
}

// A machine may use every address of its IPv6 network.
TEST_F(PeerTurnsTest, TheAddressesOfANetworkHaveOneShare) {
  const auto one = turns_.OfAddress("2001:db8::1", "2001:db8::/64");
  turns_.Of(kAlice)->Add(
      clock_.NowNs(), MessageWeight::kUrgent, [this](bool) { clock_.Advance(20 * kMillisecond); },
      one);
  EXPECT_FALSE(turns_.OfAddress("2001:db8::2", "2001:db8::/64")
                   ->HasShare(clock_.NowNs() - 10 * kMillisecond));
  EXPECT_TRUE(turns_.OfAddress("2001:db8:1::2", "2001:db8:1::/64")->HasShare(0));
}

TEST_F(PeerTurnsTest, AfterTheStopMessagesAreDropped) {
  std::string order;
  const auto add = [&](MessageWeight weight) {
    alice_->Add(clock_.NowNs(), weight, [&](bool drop) { order += drop ? 'd' : 'h'; });
  };
  add(MessageWeight::kHeavy);
  add(MessageWeight::kHeavy);
  executor_.RunNext();
  turns_.Stop();
  executor_.RunAll();
  add(MessageWeight::kLight);
  EXPECT_EQ(order, "hdd");
}

TEST_F(PeerTurnsTest, AUserWithoutStreamsIsForgottenOnceItHasPaid) {
  EXPECT_EQ(turns_.Of(kAlice), alice_);
  EXPECT_TRUE(Handle(alice_, MessageWeight::kLight, 20 * kMillisecond));
  const std::weak_ptr<UserTurns> watched = alice_;
  alice_ = nullptr;
  turns_.Of(kCarol);
  EXPECT_FALSE(watched.expired());
  EXPECT_FALSE(Handle(turns_.Of(kAlice), MessageWeight::kLight)) << "it connects again";
  executor_.RunAll();
  clock_.Advance(100 * kMillisecond);
  turns_.Of(kDave);
  EXPECT_TRUE(watched.expired());
  EXPECT_TRUE(Handle(turns_.Of(kAlice), MessageWeight::kLight));
}

// The stream may end while its message is handled.
TEST_F(PeerTurnsTest, AMessageMayDropTheStreamsReference) {
  std::shared_ptr<UserTurns> held = alice_;
  held->Add(clock_.NowNs(), MessageWeight::kLight, [this](bool) { alice_ = nullptr; });
  bool handled = false;
  held->Add(clock_.NowNs(), MessageWeight::kHeavy, [&](bool) { handled = true; });
  held = nullptr;
  executor_.RunAll();
  EXPECT_TRUE(handled);
}

TEST(PeerTurnsThreadsTest, AUsersSlowMessagesDelayNobodyElse) {
  ManualClock clock;
  Gate gate, bobs;
  std::atomic<bool> light{false};
  auto executor = std::make_unique<FairExecutor>(2);
  PeerTurns turns(&clock, executor.get());
  const auto alice = turns.Of(kAlice), bob = turns.Of(kBob);
  for (int i = 0; i < 3; ++i)
    alice->Add(clock.NowNs(), MessageWeight::kHeavy, [&](bool) { gate.Wait(); });
  bob->Add(clock.NowNs(), MessageWeight::kLight, [&](bool) { light = true; });
  EXPECT_TRUE(light);
  bob->Add(clock.NowNs(), MessageWeight::kHeavy, [&](bool) { bobs.Open(); });
  bobs.Wait();  // for ever, if the first user has all threads
  gate.Open();
  executor.reset();  // what waits there uses the turns
}

}  // namespace
}  // namespace gradsync::daemon
