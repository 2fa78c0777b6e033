// A user's work does not delay another user's job for long: each takes its turn. Runs outside
// Bazel's sandbox: inside it root cannot become another user.

#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::attack {
namespace {

struct Case {
  std::string attack;
  std::string neighbour;
  std::vector<std::string> options;  // of innocent.cc
  int steps;
  bool joins = false;  // another job joins nearly as fast as without the attack
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* attack : {"inline_reductions", "tiny_buckets", "many_sessions", "large_buckets",
                             "mapping", "abandoned_steps", "short_timeouts", "worker_starts"}) {
    // Buckets that are reduced on the thread that reads the message, and on the reduce threads.
    cases.push_back({attack, "SmallBuckets", {"--buckets=8", "--count=16384"}, 300});
    cases.push_back({attack, "LargeBuckets", {"--buckets=2", "--count=1048576"}, 150});
  }
  for (const char* attack :
       {"broadcasts", "headers", "nothings", "empty_data", "small_data", "bulk", "side_requests",
        "status_flood", "timeline_flood", "connections", "stall_and_close", "punched_holes"}) {
    cases.push_back({attack, "SmallBuckets", {"--buckets=8", "--count=16384"}, 300});
  }
  // Here the accept loop would be busy, too.
  for (Case& one : cases) one.joins = one.attack == "short_timeouts";
  return cases;
}

class Fairness : public testing::TestWithParam<Case> {};

TEST_P(Fairness, ANeighboursStepsKeepTheirTime) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const int steps = GetParam().steps;
  const std::vector<std::string> flags = {"--cuda_library=libcuda.so.1"};
  const TestDaemon daemon(flags);
  LetEveryoneIn(daemon);
  const auto another_daemon = AnotherDaemonToAttack(flags);
  const std::uint64_t begin_ns = NowNs();
  InnocentJob job(daemon, GetParam().options);
  ASSERT_TRUE(job.ready());
  const std::uint64_t join_ns = NowNs() - begin_ns;
  job.Run(50);  // warm
  const StepTimes idle = job.Run(steps);
  ASSERT_EQ(idle.error, "");

  const Attacker attacker(another_daemon == nullptr ? daemon : *another_daemon, GetParam().attack);
  ASSERT_TRUE(attacker.ready());
  const std::uint64_t since_ns = NowNs();
  const StepTimes attacked = job.Run(steps);
  std::cout << "idle: " << idle << "\nattacked: " << attacked << std::endl;
  ASSERT_EQ(attacked.error, "");
  EXPECT_EQ(attacked.wrong, 0u);
  EXPECT_LE(attacked.p50_us * 1000, FairBoundNs(3 * idle.p50_us * 1000, since_ns, /*share=*/0.5));
  EXPECT_LE(attacked.p99_us * 1000, FairBoundNs(5 * idle.p99_us * 1000, since_ns, /*share=*/0.99));

  // Another job of the innocent user begins meanwhile.
  const std::uint64_t joining_ns = NowNs();
  InnocentJob another(daemon, {"--job=another"});
  EXPECT_TRUE(another.ready());
  if (GetParam().joins) {
    EXPECT_LE(NowNs() - joining_ns, FairBoundNs(5 * join_ns, joining_ns));
  }
  EXPECT_EQ(another.Run(20).error, "");
}

INSTANTIATE_TEST_SUITE_P(Attacks, Fairness, testing::ValuesIn(Cases()), [](const auto& one) {
  return one.param.attack + "_" + one.param.neighbour;
});

}  // namespace
}  // namespace gradsync::attack
