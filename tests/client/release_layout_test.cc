// Layout::Release and the end of a Layout, against a real daemon.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

namespace gradsync {
namespace {

using testing::HasSubstr;

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

class ReleaseLayoutTest : public testing::Test {
 protected:
  void SetUp() override { job_ = JoinAll(daemon_, 2, &spec_); }

  Session& session(std::uint32_t rank) { return *job_.sessions[rank]; }
  Layout& layout(std::uint32_t rank) { return *job_.layouts[rank]; }

  void Step(std::uint64_t step) {
    OnEveryRank(2, [&](std::uint32_t rank) {
      Layout& mine = layout(rank);
      EXPECT_EQ(mine.next_step(), step);
      for (std::size_t i = 0; i < mine.bucket_count(); ++i) {
        Fill(mine.bucket(i), static_cast<float>(step + 2 * rank));
      }
      ASSERT_TRUE(MarkAllAndEnd(&mine, step).ok());
      const auto result = mine.WaitStep(step);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(ValueOf(mine.bucket(0)), static_cast<float>(step + 1));
    });
  }
  void Register(std::uint32_t rank) {
    auto registered = session(rank).RegisterLayout(spec_);
    ASSERT_TRUE(registered.ok()) << registered.status();
    job_.layouts[rank] = *std::move(registered);
  }

  const TestDaemon daemon_;
  const LayoutSpec spec_ = FloatBuckets(3, 1000);
  JobOfThreads job_;
};

TEST_F(ReleaseLayoutTest, NameIsFreeAndCallsFailButViewsStay) {
  Step(1);
  for (const std::uint32_t rank : {0u, 1u}) {
    ASSERT_TRUE(layout(rank).Release().ok());
    EXPECT_TRUE(layout(rank).WaitStep(1).ok());
    EXPECT_EQ(ValueOf(layout(rank).bucket(0)), 2.0f);
    ExpectError(layout(rank).MarkReady(2, 0), kPrecondition, "LAYOUT_RELEASED");
    ExpectError(layout(rank).Release(), kPrecondition, "LAYOUT_RELEASED");
    ExpectError(session(rank).ReplaceLayout(layout(rank), spec_).status(), kPrecondition,
                "LAYOUT_RELEASED");
  }
  OnEveryRank(2, [&](std::uint32_t rank) { Register(rank); });
  Step(1);
}

TEST_F(ReleaseLayoutTest, OpenStepMustEndFirst) {
  ASSERT_TRUE(layout(0).MarkReady(1, 0).ok());
  const absl::Status open = layout(0).Release();
  ExpectError(open, kPrecondition, "PROTOCOL_VIOLATION");
  EXPECT_THAT(std::string(open.message()), HasSubstr("while this step is open"));
  ASSERT_TRUE(layout(0).AbandonStep(1, "to release").ok());
  EXPECT_FALSE(layout(0).WaitStep(1).ok());
  EXPECT_TRUE(layout(0).Release().ok());
}

TEST_F(ReleaseLayoutTest, DestroyedLayoutAbandonsItsOpenStepAndIsReleased) {
  ASSERT_TRUE(MarkAllAndEnd(&layout(0), 1).ok());
  ASSERT_TRUE(layout(1).MarkReady(1, 0).ok());
  job_.layouts[1].reset();
  const absl::Status verdict = layout(0).WaitStep(1).status();
  ExpectError(verdict, absl::StatusCode::kAborted, "STEP_ABANDONED");
  EXPECT_THAT(std::string(verdict.message()), HasSubstr("destroyed"));
}

TEST_F(ReleaseLayoutTest, StepOfAnotherRankIsVoidAndNamesTheRank) {
  ASSERT_TRUE(layout(1).Release().ok());
  ASSERT_TRUE(MarkAllAndEnd(&layout(0), 1).ok());
  const absl::Status verdict = layout(0).WaitStep(1).status();
  ExpectError(verdict, kPrecondition, "LAYOUT_RELEASED");
  EXPECT_EQ(ErrorField(verdict, field::kRank), "1");
  // The session goes on.
  OnEveryRank(2, [&](std::uint32_t rank) { EXPECT_TRUE(session(rank).Barrier().ok()); });
}

TEST_F(ReleaseLayoutTest, HundredLayoutsOneAfterTheOtherUnderOneName) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    for (int i = 0; i < 100; ++i) {
      job_.layouts[rank].reset();
      Register(rank);
    }
  });
  Step(1);
}

TEST_F(ReleaseLayoutTest, ReplacedLayoutIsNotReleasedASecondTime) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    auto next = session(rank).ReplaceLayout(layout(rank), spec_);
    ASSERT_TRUE(next.ok()) << next.status();
    ExpectError(layout(rank).Release(), kPrecondition, "LAYOUT_REPLACED");
    job_.layouts[rank] = *std::move(next);  // destroys the old one
  });
  Step(1);
}

TEST_F(ReleaseLayoutTest, RankMayReleaseAfterTheSessionHasEnded) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    ASSERT_TRUE(session(rank).Leave().ok());
    ExpectError(layout(rank).Release(), kPrecondition, "LEFT");
    job_.layouts[rank].reset();
  });
}

}  // namespace
}  // namespace gradsync
