// The steps of a layout, against a real daemon.

#include <algorithm>
#include <cmath>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

namespace gradsync {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

class StepsTest : public testing::Test {
 protected:
  explicit StepsTest(const LayoutSpec& spec = FloatBuckets(3, 1000)) : spec_(spec) {}
  void SetUp() override { job_ = JoinAll(daemon_, 2, &spec_); }

  Layout& layout(std::uint32_t rank) { return *job_.layouts[rank]; }

  // A whole step on both ranks; returns rank 0's result.
  absl::StatusOr<StepResult> Run(std::uint64_t step) {
    absl::StatusOr<StepResult> results[2];
    OnEveryRank(2, [&](std::uint32_t rank) {
      EXPECT_TRUE(MarkAllAndEnd(&layout(rank), step).ok());
      results[rank] = layout(rank).WaitStep(step);
    });
    return results[0];
  }

  const TestDaemon daemon_;
  const LayoutSpec spec_;
  JobOfThreads job_;
};

TEST_F(StepsTest, AveragesOverTheRanks) {
  for (std::uint64_t step = 1; step <= 5; ++step) {
    OnEveryRank(2, [&](std::uint32_t rank) {
      ASSERT_EQ(layout(rank).next_step(), step);
      for (std::size_t i = 0; i < 3; ++i) {
        Fill(layout(rank).bucket(i), static_cast<float>(10 * step + i + 2 * rank));
        ASSERT_TRUE(layout(rank).MarkReady(step, i).ok());
      }
      ASSERT_TRUE(layout(rank).EndStep(step).ok());
      const auto result = layout(rank).WaitStep(step);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->step, step);
      EXPECT_EQ(result->live_ranks, 2u);
      EXPECT_EQ(result->divisor, 2u);
      EXPECT_TRUE(result->used.empty());
      ASSERT_EQ(result->buckets.size(), 3u);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(ValueOf(layout(rank).bucket(i)), static_cast<float>(10 * step + i + 1));
        const BucketTimes& times = result->buckets[i];
        ASSERT_EQ(times.ready_ns.size(), 2u);
        EXPECT_GT(times.ready_ns[0], 0u);
        EXPECT_LE(std::max(times.ready_ns[0], times.ready_ns[1]), times.start_ns);
        EXPECT_LE(times.start_ns, times.finish_ns);
      }
    });
  }
  const SessionStatistics statistics = job_.sessions[0]->Statistics();
  EXPECT_EQ(statistics.steps_complete, 5u);
  EXPECT_EQ(statistics.steps_void, 0u);
  EXPECT_EQ(statistics.buckets_marked, 15u);
  EXPECT_EQ(statistics.bytes_reduced, 5u * 3 * 1000 * sizeof(float));
  EXPECT_GT(statistics.mark_ready_total, absl::ZeroDuration());
  EXPECT_GT(statistics.exposed_total, absl::ZeroDuration());
}

TEST_F(StepsTest, ResultHasNormAndNonFiniteCount) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    Fill(layout(rank).bucket(0), rank == 0 ? 1 : 5);        // 3
    Fill(layout(rank).bucket(1), rank == 0 ? -4 : 4);       // 0
    Fill(layout(rank).bucket(2), rank == 0 ? 2e30f : 0.f);  // 1e30: its square is beyond float32
    ASSERT_TRUE(MarkAllAndEnd(&layout(rank), 1).ok());
    auto result = layout(rank).WaitStep(1);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->stats.size(), 3u);
    EXPECT_EQ(result->stats[0].sum_of_squares, 9000);
    EXPECT_EQ(result->stats[1].sum_of_squares, 0);
    EXPECT_NEAR(result->stats[2].sum_of_squares, 1e63, 1e57);
    EXPECT_NEAR(GradientNorm(*result), std::sqrt(1e63), 1e25);
    for (const GradientStats& stats : result->stats) EXPECT_EQ(stats.non_finite, 0u);

    Fill(layout(rank).bucket(2), 0);
    static_cast<float*>(layout(rank).bucket(2).data)[7 + rank] = INFINITY;
    ASSERT_TRUE(MarkAllAndEnd(&layout(rank), 2).ok());
    result = layout(rank).WaitStep(2);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->stats[0].non_finite, 0u);
    EXPECT_EQ(result->stats[2].non_finite, 2u);
    EXPECT_EQ(GradientNorm(*result), INFINITY);
  });
}

TEST_F(StepsTest, BucketIsDoneBeforeTheStep) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    Fill(layout(rank).bucket(0), rank == 0 ? 1 : 5);
    ASSERT_TRUE(layout(rank).MarkReady(1, 0).ok());
    ASSERT_TRUE(layout(rank).WaitBucket(1, 0).ok());
    EXPECT_EQ(ValueOf(layout(rank).bucket(0)), 3);
    EXPECT_EQ(layout(rank).next_step(), 1u);
    ASSERT_TRUE(layout(rank).MarkReady(1, 1).ok());
    ASSERT_TRUE(layout(rank).MarkReady(1, 2).ok());
    ASSERT_TRUE(layout(rank).EndStep(1).ok());
    ASSERT_TRUE(layout(rank).WaitStep(1).ok());
    // Decided: the verdict answers.
    EXPECT_TRUE(layout(rank).WaitBucket(1, 2).ok());
  });
}

TEST_F(StepsTest, SeveralThreadsMarkBuckets) {
  for (std::uint64_t step = 1; step <= 20; ++step) {
    OnEveryRank(2, [&](std::uint32_t rank) {
      OnEveryRank(3, [&](std::uint32_t bucket) {
        Fill(layout(rank).bucket(bucket), static_cast<float>(rank));
        EXPECT_TRUE(layout(rank).MarkReady(step, bucket).ok());
      });
      ASSERT_TRUE(layout(rank).EndStep(step).ok());
      ASSERT_TRUE(layout(rank).WaitStep(step).ok());
      for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(ValueOf(layout(rank).bucket(i)), 0.5f);
    });
  }
}

TEST_F(StepsTest, FinishStepMarksTheRestAndEndsTheStep) {
  // None, some or all of three buckets are marked before, on one rank or on both.
  std::uint64_t step = 0;
  for (std::size_t before = 0; before <= 3; ++before) {
    for (const std::size_t other : {before, std::size_t{3}}) {
      ++step;
      OnEveryRank(2, [&](std::uint32_t rank) {
        for (std::size_t i = 0; i < 3; ++i) {
          Fill(layout(rank).bucket(i), static_cast<float>(10 * step + i + 2 * rank));
        }
        // Marks from the last one down, so the rest are the first ones.
        for (std::size_t i = 0; i < (rank == 0 ? before : other); ++i) {
          ASSERT_TRUE(layout(rank).MarkReady(step, 2 - i).ok());
        }
        ASSERT_TRUE(layout(rank).FinishStep(step).ok());
        const auto result = layout(rank).WaitStep(step);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_TRUE(result->used.empty());
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(ValueOf(layout(rank).bucket(i)), static_cast<float>(10 * step + i + 1));
        }
      });
    }
  }
  for (std::uint32_t rank : {0u, 1u}) {
    const SessionStatistics statistics = job_.sessions[rank]->Statistics();
    EXPECT_EQ(statistics.steps_complete, step);
    EXPECT_EQ(statistics.buckets_marked, 3 * step);
    EXPECT_GT(statistics.mark_ready_total, absl::ZeroDuration());
    EXPECT_GT(statistics.exposed_total, absl::ZeroDuration());
  }
}

TEST_F(StepsTest, RefusedFinishStepMarksNothing) {
  Layout& mine = layout(0);
  ExpectError(mine.FinishStep(2), absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  ExpectError(mine.FinishStep(0), absl::StatusCode::kFailedPrecondition, "STALE_STEP");
  const absl::Status length = mine.FinishStep(1, {true});
  ExpectError(length, absl::StatusCode::kInvalidArgument, "MALFORMED");
  EXPECT_THAT(MessageOf(length), HasSubstr("FinishStep has flags for 1 parameters"));
  EXPECT_EQ(job_.sessions[0]->Statistics().buckets_marked, 0u);
  ASSERT_TRUE(mine.MarkReady(1, 1).ok());
  ASSERT_TRUE(mine.FinishStep(1).ok());
  EXPECT_EQ(job_.sessions[0]->Statistics().buckets_marked, 3u);
  for (const absl::Status& status :
       {mine.FinishStep(1), mine.EndStep(1), mine.MarkReady(1, 0), mine.AbandonStep(1, "late")}) {
    ExpectError(status, absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
    EXPECT_THAT(MessageOf(status), HasSubstr("after this rank had ended the step"));
  }
  ASSERT_TRUE(layout(1).FinishStep(1).ok());
  EXPECT_TRUE(mine.WaitStep(1).ok());
  EXPECT_TRUE(layout(1).WaitStep(1).ok());
  ExpectError(mine.FinishStep(1), absl::StatusCode::kFailedPrecondition, "STALE_STEP");
  // FinishStep of a void step says so, as EndStep does.
  ASSERT_TRUE(layout(1).AbandonStep(2, "an exception").ok());
  for (std::uint32_t rank : {0u, 1u}) {
    ExpectError(layout(rank).WaitStep(2).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  }
  ExpectError(mine.FinishStep(2), absl::StatusCode::kAborted, "STEP_ABANDONED");
  OnEveryRank(2, [&](std::uint32_t rank) {
    ASSERT_TRUE(layout(rank).FinishStep(3).ok());
    EXPECT_TRUE(layout(rank).WaitStep(3).ok());
  });
}

TEST_F(StepsTest, MistakeFailsTheCallAndTheStepGoesOn) {
  Layout& mine = layout(0);
  for (const std::uint32_t rank : {0u, 1u}) Fill(layout(rank).bucket(0), 2.0f * rank);
  const absl::Status unknown = mine.MarkReady(1, 3);
  ExpectError(unknown, absl::StatusCode::kInvalidArgument, "UNKNOWN_BUCKET");
  EXPECT_EQ(ErrorField(unknown, field::kBucket), "3");
  EXPECT_THAT(MessageOf(unknown), HasSubstr("the layout has 3"));
  ExpectError(mine.MarkReady(2, 0), absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  ExpectError(mine.MarkReady(0, 0), absl::StatusCode::kFailedPrecondition, "STALE_STEP");
  ASSERT_TRUE(mine.MarkReady(1, 0).ok());
  const absl::Status again = mine.MarkReady(1, 0);
  ExpectError(again, absl::StatusCode::kFailedPrecondition, "ALREADY_READY");
  EXPECT_EQ(ErrorField(again, field::kJob), "test");
  EXPECT_EQ(ErrorField(again, field::kRank), "0");
  EXPECT_EQ(ErrorField(again, field::kStep), "1");
  EXPECT_EQ(ErrorField(again, field::kBucket), "0");
  EXPECT_THAT(MessageOf(again), AllOf(HasSubstr("layout 'default'"), HasSubstr("rank 0"),
                                      HasSubstr("step 1"), HasSubstr("bucket 0")));
  const absl::Status early = mine.EndStep(1);
  ExpectError(early, absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  EXPECT_EQ(ErrorField(early, field::kBucket), "1");
  ASSERT_TRUE(mine.MarkReady(1, 1).ok());
  ASSERT_TRUE(mine.MarkReady(1, 2).ok());
  ExpectError(mine.EndStep(1, {true}), absl::StatusCode::kInvalidArgument, "MALFORMED");
  ASSERT_TRUE(mine.EndStep(1).ok());
  ExpectError(mine.MarkReady(1, 0), absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  ExpectError(mine.EndStep(1), absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  ExpectError(mine.AbandonStep(1, "late"), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");
  ExpectError(mine.WaitBucket(1, 3), absl::StatusCode::kInvalidArgument, "UNKNOWN_BUCKET");
  ExpectError(mine.WaitBucket(2, 0), absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  ExpectError(mine.WaitStep(2).status(), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");

  ASSERT_TRUE(MarkAllAndEnd(&layout(1), 1).ok());
  EXPECT_TRUE(layout(1).WaitStep(1).ok());
  EXPECT_TRUE(mine.WaitStep(1).ok());
  EXPECT_TRUE(mine.WaitStep(1).ok());  // the last verdict is kept
  EXPECT_EQ(ValueOf(mine.bucket(0)), 1);
  const absl::Status stale = mine.MarkReady(1, 0);
  EXPECT_EQ(ErrorField(stale, field::kStep), "1");
  EXPECT_THAT(MessageOf(stale), HasSubstr("the next step is 2"));
  for (const absl::Status& status : {stale, mine.EndStep(1), mine.AbandonStep(1, "late")}) {
    ExpectError(status, absl::StatusCode::kFailedPrecondition, "STALE_STEP");
  }
  ASSERT_TRUE(Run(2).ok());
  ExpectError(mine.WaitStep(1).status(), absl::StatusCode::kFailedPrecondition, "STALE_STEP");
  ExpectError(mine.WaitBucket(1, 0), absl::StatusCode::kFailedPrecondition, "STALE_STEP");
}

TEST_F(StepsTest, VerdictIsKeptWhileLaterStepsAreAbandoned) {
  ASSERT_TRUE(MarkAllAndEnd(&layout(0), 1).ok());
  ASSERT_TRUE(MarkAllAndEnd(&layout(1), 1).ok());
  ASSERT_TRUE(layout(1).WaitStep(1).ok());
  for (const std::uint64_t step : {2, 3}) {
    ASSERT_TRUE(layout(1).AbandonStep(step, "the loss is not a number").ok());
    ExpectError(layout(1).WaitStep(step).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  }
  // After those steps' StepDone.
  OnEveryRank(2, [&](std::uint32_t rank) { ASSERT_TRUE(job_.sessions[rank]->Barrier().ok()); });
  EXPECT_TRUE(layout(0).WaitBucket(1, 0).ok());
  EXPECT_TRUE(layout(0).WaitStep(1).ok());
}

TEST_F(StepsTest, AbandonedStepIsVoidOnEveryRank) {
  ASSERT_TRUE(layout(1).MarkReady(1, 0).ok());
  ASSERT_TRUE(layout(0).MarkReady(1, 2).ok());
  ASSERT_TRUE(layout(0).AbandonStep(1, "loss is n\xff n").ok());
  ASSERT_TRUE(layout(0).AbandonStep(1, "once more").ok());
  for (const std::uint32_t rank : {1u, 0u}) {
    const absl::Status bucket = layout(rank).WaitBucket(1, 1);
    ExpectError(bucket, absl::StatusCode::kAborted, "STEP_ABANDONED");
    EXPECT_EQ(ErrorField(bucket, field::kRank), "0");
    EXPECT_THAT(MessageOf(bucket), HasSubstr("loss is n? n"));
    ExpectError(layout(rank).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
    ExpectError(layout(rank).MarkReady(1, 1), absl::StatusCode::kAborted, "STEP_ABANDONED");
    EXPECT_TRUE(layout(rank).AbandonStep(1, "so be it").ok());
    EXPECT_EQ(layout(rank).next_step(), 2u);
    EXPECT_EQ(job_.sessions[rank]->Statistics().steps_void, 1u);
  }
  EXPECT_TRUE(Run(2).ok());
}

TEST_F(StepsTest, AbandonReleasesSleepingWait) {
  ASSERT_TRUE(layout(1).MarkReady(1, 0).ok());
  std::thread waiting([&] {
    ExpectError(layout(1).WaitBucket(1, 0), absl::StatusCode::kAborted, "STEP_ABANDONED");
  });
  ASSERT_TRUE(layout(0).AbandonStep(1, "an exception").ok());
  waiting.join();
}

TEST_F(StepsTest, WaitTimeoutNamesMissingRanksAndChangesNothing) {
  ASSERT_TRUE(MarkAllAndEnd(&layout(0), 1).ok());
  ASSERT_TRUE(layout(1).MarkReady(1, 0).ok());
  for (const absl::Status& status : {layout(0).WaitBucket(1, 1, absl::Milliseconds(20)),
                                     layout(0).WaitStep(1, absl::Milliseconds(20)).status()}) {
    ExpectError(status, absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
    EXPECT_THAT(MessageOf(status), HasSubstr("rank 1 has not marked bucket 1-2 ready"));
  }
  ExpectError(layout(0).WaitStep(1, absl::ZeroDuration()).status(),
              absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
  ASSERT_TRUE(layout(1).MarkReady(1, 1).ok());
  ASSERT_TRUE(layout(1).MarkReady(1, 2).ok());
  ASSERT_TRUE(layout(1).EndStep(1).ok());
  EXPECT_TRUE(layout(0).WaitStep(1).ok());
}

TEST_F(StepsTest, LeaveIsRefusedWhileAStepIsOpen) {
  ASSERT_TRUE(layout(0).MarkReady(1, 0).ok());
  ExpectError(job_.sessions[0]->Leave(), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");
  // The refused call changed nothing.
  ASSERT_TRUE(layout(0).MarkReady(1, 1).ok());
  ASSERT_TRUE(layout(0).AbandonStep(1, "to leave").ok());
  ExpectError(layout(0).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  EXPECT_TRUE(job_.sessions[0]->Leave().ok());
  // The other rank goes on alone after the void step.
  ExpectError(layout(1).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  Fill(layout(1).bucket(0), 4);
  ASSERT_TRUE(MarkAllAndEnd(&layout(1), 2).ok());
  const auto result = layout(1).WaitStep(2);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->live_ranks, 1u);
  EXPECT_EQ(ValueOf(layout(1).bucket(0)), 4);
}

TEST_F(StepsTest, CallsFailWhileThisRankHasLeftAndOthersGoOn) {
  Session& away = *job_.sessions[0];
  ExpectError(away.LeaveAndStay(absl::ZeroDuration()).status(), absl::StatusCode::kDeadlineExceeded,
              "WAIT_TIMEOUT");
  char byte = 'x';
  for (const absl::Status& status :
       {layout(0).MarkReady(1, 0), layout(0).EndStep(1), layout(0).FinishStep(1),
        layout(0).AbandonStep(1, ""), layout(0).MarkReady(2, 0), away.Barrier(),
        away.Broadcast(&byte, 1, kLowestLiveRank),
        away.AllReduce(&byte, 0, DataType::kFloat32, ReduceOp::kSum),
        away.RegisterLayout(spec_).status(), away.ReplaceLayout(layout(0), spec_).status()}) {
    ExpectError(status, absl::StatusCode::kFailedPrecondition, "LEFT");
    EXPECT_EQ(ErrorField(status, field::kRank), "0");
  }
  for (std::uint64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(MarkAllAndEnd(&layout(1), step).ok());
    ASSERT_TRUE(layout(1).WaitStep(step).ok());
    EXPECT_TRUE(job_.sessions[1]->Barrier().ok());
  }
  LayoutSpec late = spec_;
  late.name = "late";
  const absl::Status refused = job_.sessions[1]->RegisterLayout(late).status();
  ExpectError(refused, absl::StatusCode::kFailedPrecondition, "RANKS_LEFT");
  EXPECT_THAT(MessageOf(refused), HasSubstr("rank 0 left"));
  const auto last = job_.sessions[1]->LeaveAndStay();
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(*last, 1u);
  // Both ranks take part again, but rank 0 has not called LeaveAndStay again.
  ExpectError(away.Barrier(), absl::StatusCode::kFailedPrecondition, "LEFT");
  EXPECT_EQ(away.LeaveAndStay().value_or(99), 1u);
  EXPECT_EQ(layout(0).next_step(), 3u);
  ExpectError(layout(0).WaitStep(2).status(), absl::StatusCode::kFailedPrecondition, "STALE_STEP");
  EXPECT_TRUE(Run(3).ok());
  OnEveryRank(2, [&](std::uint32_t rank) {
    EXPECT_TRUE(job_.sessions[rank]->Barrier().ok());
    EXPECT_TRUE(job_.sessions[rank]->Leave().ok());
  });
}

TEST_F(StepsTest, RanksStayOverSeveralEpochs) {
  for (std::uint64_t epoch = 0; epoch < 10; ++epoch) {
    // One rank has one batch more than the other.
    const std::uint32_t longer = epoch % 2;
    OnEveryRank(2, [&](std::uint32_t rank) {
      for (int batch = 0; batch < (rank == longer ? 3 : 2); ++batch) {
        const std::uint64_t step = layout(rank).next_step();
        Fill(layout(rank).bucket(0), static_cast<float>(2 + 4 * rank));
        ASSERT_TRUE(MarkAllAndEnd(&layout(rank), step).ok());
        const auto result = layout(rank).WaitStep(step);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->live_ranks, batch < 2 ? 2u : 1u);
        EXPECT_EQ(ValueOf(layout(rank).bucket(0)), batch < 2 ? 4.0f : 2.0f + 4.0f * rank);
      }
      const auto last = job_.sessions[rank]->LeaveAndStay();
      ASSERT_TRUE(last.ok()) << last.status();
      EXPECT_EQ(*last, longer);
      float state = static_cast<float>(rank);
      ASSERT_TRUE(job_.sessions[rank]->Broadcast(&state, sizeof(state), *last).ok());
      EXPECT_EQ(state, static_cast<float>(longer));
      EXPECT_EQ(layout(rank).next_step(), 3 * (epoch + 1) + 1);
    });
  }
}

LayoutSpec TwoParameters() {
  LayoutSpec spec;
  spec.parameters.resize(10);
  for (std::size_t i = 0; i < 10; ++i) {
    spec.parameters[i] = {"p" + std::to_string(i), {4}, DataType::kFloat32};
  }
  spec.op = ReduceOp::kSum;
  return spec;
}

class UsedParametersTest : public StepsTest {
 protected:
  UsedParametersTest() : StepsTest(TwoParameters()) {}
};

TEST_F(UsedParametersTest, ResultHasTheUnion) {
  std::vector<bool> used[2] = {std::vector<bool>(10), std::vector<bool>(10)};
  used[0][0] = used[0][8] = true;
  used[1][3] = true;
  OnEveryRank(2, [&](std::uint32_t rank) {
    Layout& mine = layout(rank);
    for (std::size_t i = 0; i < mine.bucket_count(); ++i) ASSERT_TRUE(mine.MarkReady(1, i).ok());
    ASSERT_TRUE(mine.EndStep(1, used[rank]).ok());
    const auto result = mine.WaitStep(1);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->used.size(), 10u);
    for (std::size_t i = 0; i < 10; ++i) {
      EXPECT_EQ(result->used[i], i == 0 || i == 3 || i == 8) << i;
    }
  });
  // Every rank used every parameter: the union is empty.
  OnEveryRank(2, [&](std::uint32_t rank) {
    Layout& mine = layout(rank);
    static_cast<float*>(mine.gradient(7).data)[2] = 2.5f;
    for (std::size_t i = 0; i < mine.bucket_count(); ++i) ASSERT_TRUE(mine.MarkReady(2, i).ok());
    ASSERT_TRUE(mine.EndStep(2, std::vector<bool>(10, true)).ok());
    const auto result = mine.WaitStep(2);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->used.empty());
    EXPECT_EQ(static_cast<float*>(mine.gradient(7).data)[2], 5.0f);  // a sum
  });
}

TEST_F(UsedParametersTest, FinishStepContributesToTheUnion) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    Layout& mine = layout(rank);
    std::vector<bool> used(10, rank == 0);
    used[2] = used[5] = false;
    ASSERT_TRUE(mine.MarkUnused(1, 9).ok());
    ASSERT_TRUE(mine.MarkReady(1, 0).ok());
    ASSERT_TRUE(mine.FinishStep(1, used).ok());
    const auto result = mine.WaitStep(1);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->used.size(), 10u);
    for (std::size_t i = 0; i < 10; ++i) {
      EXPECT_EQ(result->used[i], i != 2 && i != 5 && i != 9) << i;
    }
  });
}

float* GradientOf(const Layout& layout, std::size_t parameter) {
  return static_cast<float*>(layout.gradient(parameter).data);
}

TEST_F(UsedParametersTest, GradientThatNoRankUsedIsRestored) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    Layout& mine = layout(rank);
    for (std::size_t i = 0; i < 10; ++i) {
      std::fill_n(GradientOf(mine, i), 4, static_cast<float>(100 * rank + i));
    }
    ASSERT_TRUE(mine.MarkUnused(1, 2).ok());
    ASSERT_TRUE(mine.MarkUnused(1, 2).ok());
    EXPECT_EQ(GradientOf(mine, 2)[3], 0);
    if (rank == 1) {
      ASSERT_TRUE(mine.MarkUnused(1, 5).ok());
    }
    // EndStep names another unused parameter.
    std::vector<bool> used(10, true);
    used[7] = false;
    ASSERT_TRUE(mine.MarkUnused(1, 9).ok());
    for (std::size_t i = 0; i < mine.bucket_count(); ++i) ASSERT_TRUE(mine.MarkReady(1, i).ok());
    ASSERT_TRUE(mine.EndStep(1, used).ok());
    OnEveryRank(3, [&](std::uint32_t) {
      const auto result = mine.WaitStep(1);
      ASSERT_TRUE(result.ok()) << result.status();
      for (std::size_t i = 0; i < 10; ++i) {
        EXPECT_EQ(result->used[i], i != 2 && i != 7 && i != 9) << i;
        const float expected = i == 2 || i == 9 ? static_cast<float>(100 * rank + i)
                               : i == 5         ? 5.0f
                                                : static_cast<float>(100 + 2 * i);
        EXPECT_EQ(GradientOf(mine, i)[3], expected) << i;
      }
    });
  });
  // The next step starts afresh.
  const auto next = Run(2);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(next->used.empty());
}

TEST_F(UsedParametersTest, VoidOrNextStepDropsHeldGradients) {
  GradientOf(layout(0), 3)[0] = 7;
  ASSERT_TRUE(layout(0).MarkUnused(1, 3).ok());
  ExpectError(job_.sessions[0]->Leave(), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");  // it is in the step
  ASSERT_TRUE(layout(1).AbandonStep(1, "no").ok());
  ExpectError(layout(0).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  ExpectError(layout(1).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  EXPECT_EQ(GradientOf(layout(0), 3)[0], 0);
  ASSERT_TRUE(Run(2).ok());
  EXPECT_EQ(GradientOf(layout(0), 3)[0], 0);

  // The next step writes before WaitStep of this one.
  for (const std::uint32_t rank : {0u, 1u}) {
    GradientOf(layout(rank), 3)[0] = 7;
    ASSERT_TRUE(layout(rank).MarkUnused(3, 3).ok());
    ASSERT_TRUE(MarkAllAndEnd(&layout(rank), 3).ok());
  }
  ASSERT_TRUE(layout(1).WaitStep(3).ok());
  EXPECT_EQ(GradientOf(layout(1), 3)[0], 7);
  while (layout(0).next_step() == 3) std::this_thread::yield();
  GradientOf(layout(0), 3)[0] = 9;
  ASSERT_TRUE(layout(0).MarkReady(4, layout(0).gradient(3).bucket).ok());
  ASSERT_TRUE(layout(0).WaitStep(3).ok());
  EXPECT_EQ(GradientOf(layout(0), 3)[0], 9);
}

TEST_F(UsedParametersTest, VoidNextStepKeepsHeldGradients) {
  for (const std::uint32_t rank : {0u, 1u}) {
    GradientOf(layout(rank), 3)[0] = 7;
    ASSERT_TRUE(layout(rank).MarkUnused(1, 3).ok());
    ASSERT_TRUE(MarkAllAndEnd(&layout(rank), 1).ok());
  }
  while (layout(0).next_step() == 1) std::this_thread::yield();
  GradientOf(layout(0), 4)[0] = 5;
  ASSERT_TRUE(layout(0).MarkUnused(2, 4).ok());
  ASSERT_TRUE(layout(1).WaitStep(1).ok());
  ASSERT_TRUE(layout(1).AbandonStep(2, "no").ok());
  while (layout(0).next_step() == 2) std::this_thread::yield();
  ASSERT_TRUE(layout(0).WaitStep(1).ok());
  EXPECT_EQ(GradientOf(layout(0), 3)[0], 7);
  EXPECT_EQ(GradientOf(layout(0), 4)[0], 0);
}

TEST_F(UsedParametersTest, MarkUnusedAfterMarkReadyIsRefused) {
  Layout& mine = layout(0);
  const absl::Status unknown = mine.MarkUnused(1, 10);
  ExpectError(unknown, absl::StatusCode::kInvalidArgument, "UNKNOWN_PARAMETER");
  EXPECT_THAT(MessageOf(unknown), HasSubstr("the layout has 10"));
  ExpectError(mine.MarkUnused(2, 1), absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  ExpectError(mine.MarkUnused(0, 1), absl::StatusCode::kFailedPrecondition, "STALE_STEP");
  const std::uint32_t bucket = mine.gradient(4).bucket;
  ASSERT_TRUE(mine.MarkReady(1, bucket).ok());
  const absl::Status late = mine.MarkUnused(1, 4);
  ExpectError(late, absl::StatusCode::kFailedPrecondition, "ALREADY_READY");
  EXPECT_EQ(ErrorField(late, field::kBucket), std::to_string(bucket));
  EXPECT_THAT(MessageOf(late), HasSubstr("parameter 4"));
}

TEST_F(StepsTest, ExplicitLayoutsRefuseMarkUnused) {
  const absl::Status status = layout(0).MarkUnused(1, 0);
  ExpectError(status, absl::StatusCode::kInvalidArgument, "UNKNOWN_PARAMETER");
  EXPECT_THAT(MessageOf(status), HasSubstr("the layout has 0"));
}

}  // namespace
}  // namespace gradsync
