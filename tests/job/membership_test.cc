// The counts of a job's ranks, and the messages to many of them.

#include "daemon/job/membership.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/job/deferred_actions.h"

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

}  // namespace
}  // namespace gradsync::daemon
