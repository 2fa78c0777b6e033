// Attacks on the peer port, the side socket and shared memory, and on a job that begins: another
// user's jobs go on, on one node and on two, and can begin. tools/soak also measures their steps.
// Runs outside Bazel's sandbox: inside it root cannot become another user, and cannot make cgroups.

#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/deadline.h"
#include "tests/kit/memory_cgroup.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::attack {
namespace {

class PortAttacks : public testing::TestWithParam<std::string> {};

TEST_P(PortAttacks, LetTheJobsOfOthersGoOn) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  // This attack connects to everything that listens in the nodes' network. So that network is its
  // own: no other test, nor any other attack of this one, has nodes there.
  const std::string network = GetParam() == "engine_strangers" ? "127.0.7." : "127.0.0.";
  TestDaemon daemon(fault::TwoNodes::Flags(network + "1", "attacked"));
  const TestDaemon other(fault::TwoNodes::Flags(network + "2", "other"));
  LetEveryoneIn(daemon);
  LetEveryoneIn(other);
  const auto across = [&](const std::string& name) -> std::vector<std::string> {
    return {"--job=" + name, "--other_socket=" + other.socket(),
            "--coordinator=" + daemon.Status().peer_address()};
  };
  InnocentJob job(daemon), job_across(daemon, across("across"));
  ASSERT_TRUE(job.ready() && job_across.ready());
  ASSERT_EQ(job_across.Run(20).error, "") << "before the attack";

  const Attacker attacker(daemon, GetParam(), kAttacker, daemon.Status().peer_address());
  ASSERT_TRUE(attacker.ready());
  for (InnocentJob* const one : {&job, &job_across}) {
    const StepTimes attacked = one->Run(200 / kScale);
    EXPECT_EQ(attacked.error, "");
    EXPECT_EQ(attacked.wrong, 0u);
  }
  InnocentJob another(daemon, {"--job=another"});
  EXPECT_TRUE(another.ready());
  EXPECT_EQ(another.Run(20).error, "");
  // Its engines listen only now, while the attacker looks for them.
  InnocentJob another_across(daemon, across("another across"));
  EXPECT_TRUE(another_across.ready());
  EXPECT_EQ(another_across.Run(20).error, "");
  EXPECT_EQ(daemon.Stop(), 0) << "it ends meanwhile, too";
}

INSTANTIATE_TEST_SUITE_P(
    Attacks, PortAttacks,
    testing::Values("peer_connections", "peer_reset_attach", "peer_reset_unknown", "peer_nothings",
                    "peer_silent_streams", "peer_greeted_streams", "peer_pings", "peer_small_data",
                    "peer_endless_messages", "side_connections", "side_requests", "punched_holes",
                    "staging_holes", "peer_strangers", "other_tokens", "engine_strangers"),
    [](const auto& one) { return one.param; });

// The attacker has little memory, and the daemon may take little more than without the attack. So
// the daemon would end if it allocated the pages that the attacker has freed.
TEST(Holes, AreNotFilledAtTheDaemonsExpense) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  std::string why;
  const auto attackers = MemoryCgroup::Make("attacker", &why);
  if (attackers == nullptr) GTEST_SKIP() << why;
  const auto daemons = MemoryCgroup::Make("daemon", &why);
  if (daemons == nullptr) GTEST_SKIP() << why;
  ASSERT_TRUE(attackers->Limit(23 * kMiB));
  TestDaemon daemon({}, {}, daemons->CommandPrefix());
  LetEveryoneIn(daemon);
  InnocentJob job(daemon);
  ASSERT_TRUE(job.ready());
  ASSERT_EQ(job.Run(200).error, "") << "before the attack";
  ASSERT_TRUE(daemons->Limit(daemons->Bytes() + 64 * kMiB));

  const Attacker attacker(daemon, "kept_holes", kAttacker, "", "", attackers->CommandPrefix());
  ASSERT_TRUE(attacker.ready()) << "the kernel has ended the daemon, or the attacker";
  const StepTimes attacked = job.Run(500);
  EXPECT_EQ(attacked.error, "");
  EXPECT_EQ(attacked.wrong, 0u);
  InnocentJob another(daemon, {"--job=another"});
  EXPECT_TRUE(another.ready());
  EXPECT_EQ(another.Run(20).error, "");
  EXPECT_EQ(daemon.Stop(), 0) << "the kernel has ended it";
}

}  // namespace
}  // namespace gradsync::attack
