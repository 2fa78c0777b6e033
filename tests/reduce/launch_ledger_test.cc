#include "daemon/reduce/launch_ledger.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

// Used as participants: only their addresses matter.
const char kA = 'a';
const char kB = 'b';
const char kC = 'c';

LaunchAnswer Ok() { return {}; }
LaunchAnswer Failed(const std::string& why) {
  LaunchAnswer answer;
  answer.status = absl::UnavailableError(why);
  return answer;
}
LaunchAnswer Measured(double sum_of_squares, std::uint64_t non_finite = 0) {
  LaunchAnswer answer;
  answer.stats = GradientStats{sum_of_squares, non_finite};
  return answer;
}
LaunchAnswer Void() {
  LaunchAnswer answer;
  answer.is_void = true;
  return answer;
}
LaunchAnswer At(std::uint64_t start_ns, std::uint64_t finish_ns) {
  LaunchAnswer answer;
  answer.times = {start_ns, finish_ns};
  return answer;
}

struct Case {
  std::string name;
  std::vector<std::pair<LaunchLedger::Participant, LaunchAnswer>>
      answers;  // the last one completes
  std::string failure;
  std::optional<double> sum_of_squares;
  bool is_void = false;
  ReduceTimes times = {10, 0};  // the launch began at 10
};

class LaunchLedgerCases : public testing::TestWithParam<Case> {};

TEST_P(LaunchLedgerCases, AnswersAddUp) {
  const Case& c = GetParam();
  LaunchLedger ledger;
  ReduceOperation operation;
  LaunchRecord launch;
  launch.operation = &operation;
  launch.times.start_ns = 10;
  const std::uint64_t number = ledger.Begin(std::move(launch), {&kA, &kB, &kC});
  std::optional<LaunchRecord> finished;
  for (const auto& [participant, answer] : c.answers) {
    EXPECT_FALSE(finished.has_value());
    EXPECT_TRUE(ledger.Owes(participant, number));
    finished = ledger.Answer(participant, number, answer);
    EXPECT_FALSE(ledger.Owes(participant, number));
  }
  ASSERT_TRUE(finished.has_value());
  EXPECT_TRUE(ledger.empty());
  EXPECT_EQ(finished->operation, &operation);
  EXPECT_EQ(finished->failure.message(), c.failure);
  EXPECT_EQ(finished->stats.has_value(), c.sum_of_squares.has_value());
  if (c.sum_of_squares.has_value()) {
    EXPECT_EQ(finished->stats->sum_of_squares, *c.sum_of_squares);
  }
  EXPECT_EQ(finished->is_void, c.is_void);
  EXPECT_EQ(finished->times.start_ns, c.times.start_ns);
  EXPECT_EQ(finished->times.finish_ns, c.times.finish_ns);
}

INSTANTIATE_TEST_SUITE_P(
    All, LaunchLedgerCases,
    testing::Values(
        Case{"AllOk", {{&kA, Ok()}, {&kB, Ok()}, {&kC, Ok()}}, "", {}},
        Case{"AnyOrder", {{&kC, Ok()}, {&kA, Ok()}, {&kB, Ok()}}, "", {}},
        Case{"OneFails", {{&kA, Ok()}, {&kB, Failed("b")}, {&kC, Ok()}}, "b", {}},
        Case{"FirstFailureCounts", {{&kC, Failed("c")}, {&kB, Failed("b")}, {&kA, Ok()}}, "c", {}},
        Case{"FirstStatsCount", {{&kA, Ok()}, {&kB, Measured(2.0)}, {&kC, Measured(3.0)}}, "", 2.0},
        Case{
            "StatsOfZeroCount", {{&kA, Measured(0.0)}, {&kB, Measured(3.0)}, {&kC, Ok()}}, "", 0.0},
        Case{"OneVoid", {{&kA, Ok()}, {&kB, Void()}, {&kC, Ok()}}, "", {}, true},
        Case{"LatestTimes",
             {{&kA, At(11, 30)}, {&kB, At(9, 40)}, {&kC, At(12, 35)}},
             "",
             {},
             false,
             {12, 40}}),
    [](const auto& info) { return info.param.name; });

TEST(LaunchLedger, NumbersCountFromOne) {
  LaunchLedger ledger;
  EXPECT_EQ(ledger.Begin({}, {&kA}), 1u);
  EXPECT_EQ(ledger.Begin({}, {&kA}), 2u);
  EXPECT_TRUE(ledger.Answer(&kA, 2, Ok()).has_value());
  EXPECT_TRUE(ledger.Answer(&kA, 1, Ok()).has_value());
  EXPECT_EQ(ledger.Begin({}, {&kA}), 3u) << "numbers are never reused";
}

TEST(LaunchLedger, UnexpectedAnswersChangeNothing) {
  LaunchLedger ledger;
  const std::uint64_t number = ledger.Begin({}, {&kA, &kB});
  EXPECT_FALSE(ledger.Answer(&kC, number, Failed("not a participant")).has_value());
  EXPECT_FALSE(ledger.Answer(&kA, number + 1, Failed("no such launch")).has_value());
  EXPECT_FALSE(ledger.Answer(&kA, number, Ok()).has_value());
  EXPECT_FALSE(ledger.Answer(&kA, number, Failed("a second time")).has_value());
  const auto finished = ledger.Answer(&kB, number, Ok());
  ASSERT_TRUE(finished.has_value());
  EXPECT_TRUE(finished->failure.ok()) << finished->failure;
}

TEST(LaunchLedger, OwedByListsTheOpenLaunchesOfOneParticipant) {
  LaunchLedger ledger;
  ledger.Begin({}, {&kA, &kB});
  ledger.Begin({}, {&kA});
  ledger.Begin({}, {&kB});
  ledger.Answer(&kA, 1, Ok());
  EXPECT_EQ(ledger.OwedBy(&kA), std::vector<std::uint64_t>{2});
  EXPECT_EQ(ledger.OwedBy(&kB), (std::vector<std::uint64_t>{1, 3}));
  EXPECT_TRUE(ledger.OwedBy(&kC).empty());
}

TEST(LaunchLedger, AParticipantIsLateLongAfterAnothersAnswer) {
  LaunchLedger ledger;
  ReduceOperation first, second;
  LaunchRecord launch;
  launch.operation = &first;
  const std::uint64_t number = ledger.Begin(launch, {&kA, &kB, &kC});
  launch.operation = &second;
  ledger.Begin(launch, {&kA});
  EXPECT_TRUE(ledger.Late(1000, 10).empty()) << "nobody has answered";
  ledger.Answer(&kB, number, At(5, 20));
  EXPECT_TRUE(ledger.Late(30, 10).empty());
  EXPECT_EQ(ledger.Late(31, 10), (std::set<LaunchLedger::Participant>{&kA, &kC}));
  ledger.Answer(&kA, number, At(5, 31));
  EXPECT_TRUE(ledger.Late(41, 10).empty()) << "the last answer counts";
  EXPECT_EQ(ledger.Late(42, 10), (std::set<LaunchLedger::Participant>{&kC}));
}

TEST(LaunchLedger, LaunchesKeepTheirOwnersAlive) {
  LaunchLedger ledger;
  auto owner = std::make_shared<int>(7);
  const std::weak_ptr<int> weak = owner;
  LaunchRecord launch;
  launch.owner = std::move(owner);
  ledger.Begin(std::move(launch), {&kA});
  EXPECT_FALSE(weak.expired());
  EXPECT_EQ(ledger.Owners().size(), 1u);
  ledger.Answer(&kA, 1, Ok());
  EXPECT_TRUE(weak.expired());
}

TEST(LaunchLedger, FinishSetsTheOperationsResultsFirst) {
  ReduceOperation operation;
  operation.work.emplace<DeviceReduction>();
  std::uint64_t finish_ns = 0;
  operation.done = [&](const ReduceTimes& times) {
    EXPECT_EQ(operation.failure.message(), "lost");
    EXPECT_EQ(operation.stats.sum_of_squares, 2.5);
    EXPECT_TRUE(operation.device().is_void);
    finish_ns = times.finish_ns;
  };
  LaunchRecord launch;
  launch.operation = &operation;
  launch.failure = absl::UnavailableError("lost");
  launch.stats = GradientStats{2.5, 0};
  launch.is_void = true;
  launch.times = {1, 9};
  Finish(launch);
  EXPECT_EQ(finish_ns, 9u);
}

}  // namespace
}  // namespace gradsync::daemon
