// Session::ReplaceLayout, against a real daemon.

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

namespace gradsync {
namespace {

using testing::HasSubstr;

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

class ReplaceLayoutTest : public testing::Test {
 protected:
  void SetUp() override { job_ = JoinAll(daemon_, 2, &old_spec_); }

  Session& session(std::uint32_t rank) { return *job_.sessions[rank]; }
  Layout& layout(std::uint32_t rank) { return *job_.layouts[rank]; }

  void Step(const std::vector<std::unique_ptr<Layout>>& layouts, std::uint64_t step) {
    OnEveryRank(2, [&](std::uint32_t rank) {
      Layout& mine = *layouts[rank];
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

  const TestDaemon daemon_;
  const LayoutSpec old_spec_ = FloatBuckets(3, 1000);
  JobOfThreads job_;
};

TEST_F(ReplaceLayoutTest, GoesOnWithOtherBucketsAndTheNextStep) {
  Step(job_.layouts, 1);
  std::vector<std::unique_ptr<Layout>> next(2);
  const LayoutSpec spec = FloatBuckets(5, 600);
  OnEveryRank(2, [&](std::uint32_t rank) {
    auto replaced = session(rank).ReplaceLayout(layout(rank), spec);
    ASSERT_TRUE(replaced.ok()) << replaced.status();
    next[rank] = *std::move(replaced);
  });
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(next[rank]->bucket_count(), 5u);
    Layout& old = layout(rank);
    for (const absl::Status& status :
         {old.MarkReady(2, 0), old.EndStep(2), old.AbandonStep(2, "late"), old.MarkUnused(2, 0),
          old.WaitBucket(2, 0), old.WaitStep(2).status(),
          session(rank).ReplaceLayout(old, spec).status()}) {
      ExpectError(status, kPrecondition, "LAYOUT_REPLACED");
      EXPECT_EQ(ErrorField(status, field::kRank), std::to_string(rank));
    }
    EXPECT_TRUE(old.WaitStep(1).ok());  // the last verdict is kept
    EXPECT_EQ(ValueOf(old.bucket(2)), 2);
  }
  Step(next, 2);
  job_.layouts.clear();
  Step(next, 3);
}

TEST_F(ReplaceLayoutTest, MismatchKeepsTheOldLayout) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    const absl::Status status =
        session(rank).ReplaceLayout(layout(rank), FloatBuckets(4 + rank, 10)).status();
    ExpectError(status, kPrecondition, "LAYOUT_MISMATCH");
  });
  Step(job_.layouts, 1);
}

TEST_F(ReplaceLayoutTest, MistakeFailsTheCall) {
  ASSERT_TRUE(layout(0).MarkReady(1, 0).ok());
  const absl::Status open = session(0).ReplaceLayout(layout(0), old_spec_).status();
  ExpectError(open, kPrecondition, "PROTOCOL_VIOLATION");
  EXPECT_THAT(std::string(open.message()), HasSubstr("ReplaceLayout while this step is open"));
  ExpectError(session(0).ReplaceLayout(layout(1), old_spec_).status(),
              absl::StatusCode::kInvalidArgument, "MALFORMED");
  ExpectError(session(1).ReplaceLayout(layout(1), LayoutSpec()).status(),
              absl::StatusCode::kInvalidArgument, "MALFORMED");
  EXPECT_TRUE(layout(1).AbandonStep(1, "to go on").ok());
  ExpectError(layout(0).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  ExpectError(layout(1).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  Step(job_.layouts, 2);
}

TEST_F(ReplaceLayoutTest, OldLayoutIsBlockedAndItsWaitsAreReleased) {
  std::thread waiting(
      [&] { ExpectError(layout(0).WaitStep(1).status(), kPrecondition, "LAYOUT_REPLACED"); });
  std::thread waiting_for_bucket(
      [&] { ExpectError(layout(0).WaitBucket(1, 0), kPrecondition, "LAYOUT_REPLACED"); });
  std::thread replacing([&] {
    const auto replaced = session(0).ReplaceLayout(layout(0), old_spec_);
    EXPECT_TRUE(replaced.ok()) << replaced.status();
  });
  absl::Status refused;
  do {
    refused = layout(0).MarkUnused(1, 0);
  } while (ErrorReason(refused) == "UNKNOWN_PARAMETER");
  ExpectError(refused, kPrecondition, "PROTOCOL_VIOLATION");
  ExpectError(session(0).ReplaceLayout(layout(0), old_spec_).status(), kPrecondition,
              "PROTOCOL_VIOLATION");
  EXPECT_TRUE(session(1).ReplaceLayout(layout(1), old_spec_).ok());
  replacing.join();
  waiting.join();
  waiting_for_bucket.join();
}

TEST_F(ReplaceLayoutTest, ReplacesManyTimes) {
  for (std::uint64_t step = 1; step <= 50; ++step) {
    OnEveryRank(2, [&](std::uint32_t rank) {
      auto next = session(rank).ReplaceLayout(layout(rank), FloatBuckets(1 + step % 4, 5000));
      ASSERT_TRUE(next.ok()) << next.status();
      job_.layouts[rank] = *std::move(next);
    });
    Step(job_.layouts, step);
  }
}

}  // namespace
}  // namespace gradsync
