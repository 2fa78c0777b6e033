// A user's work between nodes does not delay another user's job between nodes for long: the threads
// of the peer port handle short messages at once, and the long ones have turns. Runs outside
// Bazel's sandbox: inside it root cannot become another user.

#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::attack {
namespace {

class AcrossNodes : public testing::TestWithParam<std::string> {};

TEST_P(AcrossNodes, ANeighboursStepsKeepTheirTime) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  constexpr int kSteps = 300;
  TestDaemon daemon(fault::TwoNodes::Flags("127.0.0.1", "attacked"));
  const TestDaemon other(fault::TwoNodes::Flags("127.0.0.2", "other"));
  LetEveryoneIn(daemon);
  LetEveryoneIn(other);
  const auto another_daemon = AnotherDaemonToAttack(fault::TwoNodes::Flags("127.0.0.3", "third"));
  const auto its_other = AnotherDaemonToAttack(fault::TwoNodes::Flags("127.0.0.4", "fourth"));
  const std::string peer = daemon.Status().peer_address();
  const std::vector<std::string> across = {"--other_socket=" + other.socket(),
                                           "--coordinator=" + peer, "--buckets=4", "--count=16384"};
  InnocentJob job(daemon, across);
  ASSERT_TRUE(job.ready());
  job.Run(50);  // warm
  const StepTimes idle = job.Run(kSteps);
  ASSERT_EQ(idle.error, "");

  const TestDaemon& target = another_daemon == nullptr ? daemon : *another_daemon;
  const Attacker attacker(target, GetParam(), kAttacker, target.Status().peer_address(),
                          its_other == nullptr ? other.socket() : its_other->socket());
  ASSERT_TRUE(attacker.ready());
  const std::uint64_t since_ns = NowNs();
  const StepTimes attacked = job.Run(kSteps);
  std::cout << "idle: " << idle << "\nattacked: " << attacked << std::endl;
  ASSERT_EQ(attacked.error, "") << "no link counts as silent";
  EXPECT_EQ(attacked.wrong, 0u);
  EXPECT_LE(attacked.p50_us * 1000, FairBoundNs(3 * idle.p50_us * 1000, since_ns, /*share=*/0.5));
  EXPECT_LE(attacked.p99_us * 1000, FairBoundNs(5 * idle.p99_us * 1000, since_ns, /*share=*/0.99));

  // Another job of the innocent user begins meanwhile.
  std::vector<std::string> another_across = across;
  another_across.emplace_back("--job=another");
  InnocentJob another(daemon, another_across);
  EXPECT_TRUE(another.ready());
  EXPECT_EQ(another.Run(20).error, "");
  EXPECT_EQ(daemon.Stop(), 0) << "it ends meanwhile, too";
}

INSTANTIATE_TEST_SUITE_P(Attacks, AcrossNodes,
                         testing::Values("steps_across", "registrations_across",
                                         "large_buckets_across", "broadcasts_across",
                                         "coordinators_headers", "coordinators_short_floods",
                                         "coordinators_nothings", "coordinators_pings",
                                         "coordinators_engines", "coordinators_longest"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace gradsync::attack
