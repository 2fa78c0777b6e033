// Attacks on the peer port, the side socket and shared memory: another user's jobs go on, on one
// node and on two, and can begin. tools/soak also measures their steps. Runs outside Bazel's
// sandbox: inside it root cannot become another user.

#include <unistd.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::attack {
namespace {

class PortAttacks : public testing::TestWithParam<std::string> {};

TEST_P(PortAttacks, LetTheJobsOfOthersGoOn) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  TestDaemon daemon(fault::TwoNodes::Flags("127.0.0.1", "attacked"));
  const TestDaemon other(fault::TwoNodes::Flags("127.0.0.2", "other"));
  LetEveryoneIn(daemon);
  LetEveryoneIn(other);
  const std::vector<std::string> across = {"--job=across", "--other_socket=" + other.socket(),
                                           "--coordinator=" + daemon.Status().peer_address()};
  InnocentJob job(daemon), job_across(daemon, across);
  ASSERT_TRUE(job.ready() && job_across.ready());
  ASSERT_EQ(job_across.Run(20).error, "") << "before the attack";

  const Attacker attacker(daemon, GetParam(), kAttacker, daemon.Status().peer_address());
  ASSERT_TRUE(attacker.ready());
  for (InnocentJob* const one : {&job, &job_across}) {
    const StepTimes attacked = one->Run(200);
    EXPECT_EQ(attacked.error, "");
    EXPECT_EQ(attacked.wrong, 0u);
  }
  InnocentJob another(daemon, {"--job=another"});
  EXPECT_TRUE(another.ready());
  EXPECT_EQ(another.Run(20).error, "");
  EXPECT_EQ(daemon.Stop(), 0) << "it ends meanwhile, too";
}

INSTANTIATE_TEST_SUITE_P(Attacks, PortAttacks,
                         testing::Values("peer_connections", "peer_reset_attach",
                                         "peer_reset_unknown", "peer_nothings",
                                         "peer_silent_streams", "peer_greeted_streams",
                                         "side_connections", "side_requests", "punched_holes"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace gradsync::attack
