// Compares daemon/job with a model of what must hold, over all interleavings of small cases: two or
// three ranks, two buckets and one or two steps. Reductions complete in any order at any point. In
// some cases the executor writes done words, also at any point. Faults happen at every point.
//
// A case either runs every schedule, or makes every choice in every state of the model, after
// several different histories.

#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <ostream>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/job/checked_job.h"
#include "tests/job/job_model.h"
#include "tests/job/schedule_explorer.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kAll = ScheduleExplorer::kUnbounded;

// A schedule takes 10 microseconds, and many times that with AddressSanitizer.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

struct Case {
  const char* name;
  ModelOptions options;
  std::uint32_t histories;
  std::uint32_t histories_sanitized;  // 0: too slow with a sanitizer
  std::uint64_t at_least;             // schedules, unless sanitized

  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

// The states and schedules to cover, computed from the model alone.
class StateGraph {
 public:
  // The number of schedules from `model` on. Wraps around for cases that are too large to run in
  // full.
  std::uint64_t Count(const JobModel& model) {
    const std::uint64_t key = model.Key();
    if (const auto found = schedules_.find(key); found != schedules_.end()) return found->second;
    std::vector<Event> enabled;
    model.Enabled(&enabled);
    if (enabled.empty()) return 1;
    std::uint64_t schedules = 0;
    for (const Event& event : enabled) {
      JobModel next = model;
      next.Apply(event);
      schedules += Count(next);
    }
    schedules_[key] = schedules;
    return schedules;
  }
  // The states that Count() has visited and in which an event can happen.
  std::size_t states() const { return schedules_.size(); }

 private:
  absl::flat_hash_map<std::uint64_t, std::uint64_t> schedules_;
};

class ModelTest : public testing::TestWithParam<Case> {};

TEST_P(ModelTest, MatchesTheModel) {
  const Case& param = GetParam();
  const std::uint32_t histories = kSanitized ? param.histories_sanitized : param.histories;
  if (histories == 0) GTEST_SKIP() << "a sanitizer is too slow for so many states";
  ModelMemory memory = MakeModelMemory();
  ScheduleExplorer explorer(histories);
  std::vector<Event> enabled, schedule;
  do {
    CheckedJob job(param.options, &memory);
    schedule.resize(explorer.Repeat());
    for (const Event& event : schedule) job.Replay(event);
    while (job.violation().empty()) {
      job.model().Enabled(&enabled);
      if (enabled.empty()) {
        job.Finish();
        break;
      }
      const auto choice = explorer.Choose(enabled.size(), job.model().Key());
      if (!choice.has_value()) break;  // enough other schedules have continued from here
      schedule.push_back(enabled[*choice]);
      job.Apply(schedule.back());
    }
    ASSERT_EQ(job.violation(), "")
        << "after: " << absl::StrJoin(schedule, ", ", [](std::string* out, const Event& event) {
             out->append(Describe(event));
           });
  } while (explorer.Next());

  StateGraph graph;
  const std::uint64_t all = graph.Count(JobModel(param.options));
  std::cout << explorer.schedules() << " schedules, " << explorer.states() << " states\n";
  EXPECT_EQ(explorer.states(), graph.states());
  if (histories == kAll) {
    EXPECT_EQ(explorer.schedules(), all);
  }
  if (!kSanitized) {
    EXPECT_GE(explorer.schedules(), param.at_least);
  }
}

constexpr unsigned kNoFault = 0;
constexpr unsigned kRelease = FaultBit(Action::kRelease);
constexpr unsigned kDrain = FaultBit(Action::kDrain);
constexpr unsigned kAnyFault = ~(kRelease | kDrain);  // these two have cases of their own

ModelOptions Options(int ranks, std::uint64_t steps, unsigned faults, int budget) {
  ModelOptions options;
  options.ranks = ranks;
  options.steps = steps;
  options.faults = faults;
  options.fault_budget = budget;
  return options;
}
ModelOptions AtOnce(ModelOptions options) {
  options.reduce_at_once = true;
  return options;
}
ModelOptions WordsLater(ModelOptions options) {
  options.words_later = true;
  return options;
}
ModelOptions DividedByWorld(ModelOptions options) {
  options.divide_by_world = true;
  return options;
}

const Case kCases[] = {
    // Every schedule.
    {"OneStepOneFault", Options(2, 1, kAnyFault, 1), kAll, 20, 95'000},
    {"OneStepTwoFaults", Options(2, 1, kAnyFault, 2), kAll, 1, 1'500'000},
    {"OneStepOfThreeRanks", Options(3, 1, kNoFault, 0), kAll, 20, 390'000},
    {"TwoStepsAtOnceAndALoss", AtOnce(Options(2, 2, FaultBit(Action::kLose), 1)), kAll, 20, 99'000},
    {"TwoStepsAtOnceAndAnAbandon", AtOnce(Options(2, 2, FaultBit(Action::kAbandon), 1)), kAll, 20,
     260'000},
    {"TwoStepsAtOnceAndALeave", AtOnce(Options(2, 2, FaultBit(Action::kLeave), 2)), kAll, 20,
     26'000},
    {"TwoStepsAtOnceAndRanksThatComeBack", AtOnce(Options(2, 2, FaultBit(Action::kLeave), 3)), 1000,
     20, 40'000},
    {"TwoStepsAtOnceAndASuccessor", AtOnce(Options(2, 2, FaultBit(Action::kSupersede), 1)), kAll,
     20, 49'000},
    {"TwoStepsAtOnceAndAFinish", AtOnce(Options(2, 2, FaultBit(Action::kFinish), 2)), kAll, 20,
     10'000},
    {"OneStepAndTwoReleases", Options(2, 1, kRelease, 2), kAll, 20, 10'000},
    // Every choice in every state.
    {"TwoSteps", Options(2, 2, kNoFault, 0), 1000, 20, 69'000},
    {"TwoStepsOneFault", Options(2, 2, kAnyFault, 1), 100, 3, 220'000},
    {"TwoStepsTwoFaults", Options(2, 2, kAnyFault, 2), 10, 2, 200'000},
    {"TwoStepsThreeFaults", Options(2, 2, kAnyFault, 3), 4, 0, 300'000},
    {"ThreeRanksOneFault", Options(3, 2, kAnyFault, 1), 5, 1, 130'000},
    {"ThreeRanksTwoFaults", Options(3, 2, kAnyFault, 2), 1, 0, 240'000},
    {"ThreeRanksLeavingByTheWorld",
     DividedByWorld(Options(3, 2, FaultBit(Action::kLeave) | FaultBit(Action::kAbandon), 3)), 2, 1,
     140'000},
    {"OneStepOneFaultAndARelease", Options(2, 1, kAnyFault | kRelease, 2), 20, 2, 20'000},
    {"TwoStepsOneFaultAndARelease", Options(2, 2, kAnyFault | kRelease, 2), 1, 1, 20'000},
    {"ThreeRanksAndAReleaseAtOnce", AtOnce(Options(3, 2, kRelease | FaultBit(Action::kLeave), 2)),
     1, 1, 10'000},
    {"ThreeRanksAtOnce", AtOnce(Options(3, 2, kAnyFault, 1)), 5, 1, 100'000},
    // The executor writes done words. It takes two faults to begin with those of ranks that stay.
    {"WordsOfAVoidStepLater", WordsLater(Options(2, 1, kAnyFault | kDrain, 2)), 2, 1, 1'000},
    {"WordsLaterAndThreeFaults",
     WordsLater(AtOnce(Options(2, 2, kAnyFault | kRelease | kDrain, 3))), 1, 0, 1'000},
    {"WordsLaterAndRanksThatLeave",
     WordsLater(AtOnce(Options(2, 2,
                               FaultBit(Action::kLeave) | FaultBit(Action::kLose) |
                                   FaultBit(Action::kSupersede) | kRelease | kDrain,
                               4))),
     1, 1, 1'000},
    {"WordsOfThreeRanksLater",
     WordsLater(AtOnce(Options(3, 2, FaultBit(Action::kLeave) | FaultBit(Action::kAbandon), 3))), 1,
     0, 1'000},
};

INSTANTIATE_TEST_SUITE_P(Job, ModelTest, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace gradsync::daemon
