// The job room against a model of what must hold, over every interleaving of small cases: two or
// three ranks, two buckets, two steps, with reductions that are held back and completed in any
// order at any point, and with faults at every point.

#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "tests/job/checked_job.h"
#include "tests/job/job_model.h"
#include "tests/job/schedule_explorer.h"

namespace gradsync {
namespace {

struct Case {
  const char* name;
  ModelOptions options;
  std::uint32_t histories;
  std::uint64_t at_least;  // schedules
};

struct Covered {
  std::uint64_t schedules = 0;
  std::uint64_t events = 0;
};

class EveryInterleaving : public testing::TestWithParam<Case> {};

TEST_P(EveryInterleaving, HoldsToTheModel) {
  const Case& param = GetParam();
  ModelMemory memory = MakeModelMemory();
  ScheduleExplorer explorer(param.histories);
  std::uint64_t events = 0;
  std::vector<Event> enabled, schedule;
  do {
    CheckedJob job(param.options, &memory);
    schedule.clear();
    for (;;) {
      job.model().Enabled(&enabled);
      if (enabled.empty()) {
        job.Finish();
        break;
      }
      const auto choice = explorer.Choose(enabled.size(), job.model().Key());
      if (!choice.has_value()) break;  // others go on from here
      schedule.push_back(enabled[*choice]);
      if (explorer.replaying()) {
        job.Replay(schedule.back());
        continue;
      }
      job.Apply(schedule.back());
      ++events;
      if (!job.violation().empty()) break;
    }
    ASSERT_EQ(job.violation(), "") << "after: "
                                   << absl::StrJoin(schedule, ", ",
                                                    [](std::string* out, const Event& event) {
                                                      out->append(Describe(event));
                                                    });
  } while (explorer.Next());
  std::cout << param.name << ": " << explorer.schedules() << " schedules, " << events
            << " events\n";
  EXPECT_GE(explorer.schedules(), param.at_least);
}

ModelOptions Options(int ranks, unsigned faults, int budget) {
  ModelOptions options;
  options.ranks = ranks;
  options.faults = faults;
  options.fault_budget = budget;
  return options;
}

const Case kCases[] = {
    {"TwoRanks", Options(2, 0, 0), 2000, 1},
    {"TwoRanksLose", Options(2, FaultBit(Action::kLose), 1), 1, 1},
    {"TwoRanksAbandon", Options(2, FaultBit(Action::kAbandon), 1), 1, 1},
    {"TwoRanksLeave", Options(2, FaultBit(Action::kLeave), 2), 1, 1},
    {"TwoRanksDeadline", Options(2, FaultBit(Action::kDeadline), 1), 1, 1},
    {"TwoRanksSupersede", Options(2, FaultBit(Action::kSupersede), 1), 1, 1},
    {"TwoRanksBreach", Options(2, FaultBit(Action::kBreach), 1), 1, 1},
    {"TwoRanksTwoFaults", Options(2, ~0u, 2), 1, 1},
    {"ThreeRanks", Options(3, 0, 0), 1, 1},
    {"ThreeRanksOneFault", Options(3, ~0u, 1), 1, 1},
};

INSTANTIATE_TEST_SUITE_P(Job, EveryInterleaving, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace gradsync
