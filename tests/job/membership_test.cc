// The counts of a job's ranks, and the messages to many of them.

#include "daemon/job/membership.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/session_message.h"

namespace gradsync::daemon {
namespace {

using State = RankState;

class MembershipTest : public testing::Test {
 protected:
  // Compares each count and question with what the states of all ranks say.
  void ExpectCountsMatch() {
    std::vector<std::uint32_t> counts(kRankStates);
    std::uint32_t awaited = 0;
    bool missing = false, recovering = false, present = false;
    for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
      const State state = members_[rank].state;
      ++counts[static_cast<std::size_t>(state)];
      awaited += members_.IsAwaited(rank) ? 1 : 0;
      missing = missing || IsMissing(state);
      recovering = recovering || IsRecovering(state);
      present = present || TakesPart(state) || state == State::kAbsent;
    }
    for (std::size_t state = 0; state < kRankStates; ++state) {
      EXPECT_EQ(members_.Count(static_cast<State>(state)), counts[state]) << "state " << state;
    }
    EXPECT_EQ(members_.StepRanks(), awaited);
    EXPECT_EQ(members_.AnyIsMissing(), missing);
    EXPECT_EQ(members_.AnyIsRecovering(), recovering);
    EXPECT_EQ(members_.AllHaveLeft(), !present);
    EXPECT_EQ(members_.Formed(), counts[static_cast<std::size_t>(State::kAbsent)] == 0);
  }
  void Join(std::uint32_t rank, bool loads = false) {
    members_.Join(rank, ++incarnation_, nullptr, "", loads);
  }

  Membership members_{5, "alpha"};
  std::uint64_t incarnation_ = 0;
  DeferredActions actions_;
};

TEST_F(MembershipTest, CountsFollowEveryChangeOfState) {
  ExpectCountsMatch();
  for (std::uint32_t rank = 0; rank < 5; ++rank) {
    Join(rank);
    ExpectCountsMatch();
  }
  const absl::Status why = absl::AbortedError("its process has ended");
  const std::vector<std::function<void()>> changes = {
      [&] { members_.Hold(0, why, &actions_); },
      [&] { Join(0, /*loads=*/true); },
      [&] { members_.Admit(0); },
      [&] { members_.Heal(0); },
      [&] { members_.Hold(1, why, &actions_); },
      [&] { Join(1); },
      [&] { members_.Heal(1); },
      [&] { members_.Stay(2); },
      [&] { members_.Stay(3); },
      [&] { members_.Exit(3, /*now_ns=*/1); },
      [&] { members_.Resume(); },
      [&] { members_.Finish(1, /*now_ns=*/2); },
      [&] { members_.Exit(0, /*now_ns=*/3); },
      [&] { members_.Lose(2, why); },
      [&] { members_.Finish(4, /*now_ns=*/4); },
  };
  for (std::size_t change = 0; change < changes.size(); ++change) {
    SCOPED_TRACE(change);
    changes[change]();
    ExpectCountsMatch();
  }
  EXPECT_TRUE(members_.AllHaveLeft());
}

TEST_F(MembershipTest, NodesAreNamedWhileSomeRankIsOnAnotherOne) {
  Join(0);
  EXPECT_FALSE(members_.SpansNodes());
  EXPECT_EQ(members_.Name(0), "0");
  members_.Join(1, ++incarnation_, nullptr, "beta");
  EXPECT_TRUE(members_.SpansNodes());
  EXPECT_EQ(members_.Name(0), "0 (node alpha)");
  EXPECT_EQ(members_.Name(1), "1 (node beta)");
  members_.Hold(1, absl::AbortedError("lost"), &actions_);
  Join(1);
  EXPECT_FALSE(members_.SpansNodes());
}

// Counts what it gets. Keeps no message, because it gets many.
class CountingSink final : public SessionSink {
 public:
  void Queue(SessionMessage) override { ++queued; }
  void Flush() override { flushed = queued; }

  std::uint64_t queued = 0;
  std::uint64_t flushed = 0;
};

// If each message looked through the sessions that have one already, that would be 2e11 looks.
TEST(SendTest, ManyMessagesToAHugeJobFlushEachSessionOnceAndInOrder) {
  constexpr std::uint32_t kRanks = 65'536;
  constexpr std::uint64_t kTransactions = 50;
  Membership members(kRanks);
  std::vector<std::shared_ptr<CountingSink>> sinks;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    sinks.push_back(std::make_shared<CountingSink>());
    members.Join(rank, /*incarnation=*/rank + 1, sinks.back(), "");
  }
  for (std::uint64_t transaction = 0; transaction < kTransactions; ++transaction) {
    DeferredActions actions;
    for (const std::uint64_t sequence : {1, 2}) {
      for (std::uint32_t i = 0; i < kRanks; ++i) {
        members.Send(kRanks - 1 - i, HealedMessage{sequence}, &actions);
      }
    }
    ASSERT_EQ(actions.flushes.size(), kRanks);
    for (std::uint32_t i = 0; i < kRanks; ++i) {
      ASSERT_EQ(actions.flushes[i], sinks[kRanks - 1 - i]);
      actions.flushes[i]->Flush();
    }
  }
  for (const auto& sink : sinks) ASSERT_EQ(sink->flushed, 2 * kTransactions);
}

TEST(SendTest, NextSessionOfARankIsFlushedBesideTheLastOne) {
  Membership members(1);
  const auto first = std::make_shared<CountingSink>(), next = std::make_shared<CountingSink>();
  DeferredActions actions;
  members.Join(0, /*incarnation=*/1, first, "");
  members.Send(0, HealedMessage{1}, &actions);
  members.Join(0, /*incarnation=*/2, next, "");
  members.Send(0, HealedMessage{1}, &actions);
  ASSERT_EQ(actions.flushes.size(), 2u);
  EXPECT_EQ(actions.flushes[0], first);
  EXPECT_EQ(actions.flushes[1], next);
}

}  // namespace
}  // namespace gradsync::daemon
