// The daemon ends connections that do harm: they open calls and reset them at once, as fast as a
// client can (CVE-2023-44487), or send headers without end (CVE-2023-33953) or frames with little
// or no data. So these attacks take little memory, and another user's job goes on. Runs outside
// Bazel's sandbox: inside it root cannot become another user.

#include <unistd.h>

#include <iostream>
#include <memory>
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "tests/attack/logged_reasons.h"
#include "tests/attack/neighbours.h"
#include "tests/kit/deadline.h"
#include "tests/kit/process_memory.h"
#include "tests/kit/test_daemon.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::attack {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
// Without a limit it is gigabytes after this time, and the daemon ends at kMost.
constexpr std::uint64_t kAttackNs = 3'000'000'000;
constexpr char kMost[] = "--as=5368709120";
constexpr std::uint64_t kLongestStepNs = 1'000'000'000;
constexpr std::uint64_t kMostCost = 64 * kMiB;

// Why the daemon ends connections: before gRPC sees what they send, and after.
constexpr char kRefused[] =
    "their headers are too long, have no end or follow messages, they reset too many calls, "
    "or they send too much that is no data";
constexpr char kManyCalls[] = "the user has more open calls than a user may have";

struct Case {
  const char* attack;
  const char* why;               // the daemon must say
  const char* or_why = nullptr;  // it may say, too
};

class HarmfulConnections : public testing::TestWithParam<Case> {};

TEST_P(HarmfulConnections, TakeLittleMemoryAndDelayNoOneForLong) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const TestDaemon daemon({}, {}, {"/usr/bin/prlimit", kMost});
  LetEveryoneIn(daemon);
  InnocentJob job(daemon);
  ASSERT_TRUE(job.ready());
  InnocentJob own(daemon, {"--job=own"}, kAttacker);
  ASSERT_TRUE(own.ready());
  ASSERT_EQ(own.Run(20).error, "");
  const StepTimes idle = job.Run(200);
  ASSERT_EQ(idle.error, "");
  const std::uint64_t before = MemoryBytes(daemon.pid(), "VmHWM");

  auto attacker = std::make_unique<Attacker>(daemon, GetParam().attack);
  ASSERT_TRUE(attacker->ready());
  const std::uint64_t since_ns = NowNs();
  const std::uint64_t until_ns = since_ns + kAttackNs;
  while (NowNs() < until_ns) {
    const StepTimes attacked = job.Run(200);
    ASSERT_EQ(attacked.error, "");
    EXPECT_EQ(attacked.wrong, 0u);
    EXPECT_LT(attacked.max_us * 1000, FairBoundNs(kLongestStepNs, since_ns)) << attacked;
    if (NowNs() >= until_ns) std::cout << "idle: " << idle << "\nattacked: " << attacked << "\n";
  }
  const std::uint64_t cost = MemoryBytes(daemon.pid(), "VmHWM") - before;
  std::cout << "memory: " << before / kMiB << " MiB before, " << cost / kMiB << " MiB more"
            << std::endl;
  EXPECT_LT(cost, kMostCost);
  EXPECT_EQ(daemon.Status().jobs_size(), 2) << "root may ask";
  const std::string log = daemon.Log();
  std::set<std::string> why = LoggedReasons(log, "connections ended uid=12345");
  if (GetParam().or_why != nullptr) why.erase(GetParam().or_why);
  EXPECT_EQ(why, std::set<std::string>{GetParam().why}) << log;

  EXPECT_EQ(own.Run(20).error, "") << "the attacker's user keeps its trainers";

  // The attacker's user is let in again. gRPC may still read bytes of the attack, and these can end
  // the user's connections once more.
  attacker = nullptr;
  std::string error = "no attempt";
  const std::uint64_t give_up_ns = NowNs() + std::uint64_t{kPatienceMs} * 1'000'000;
  for (int attempt = 0; !error.empty() && NowNs() < give_up_ns; ++attempt) {
    InnocentJob another(daemon, {"--job=another" + std::to_string(attempt)}, kAttacker);
    error = another.ready() ? another.Run(20).error : "it did not join";
  }
  EXPECT_EQ(error, "");
}

INSTANTIATE_TEST_SUITE_P(
    Attacks, HarmfulConnections,
    testing::Values(
        // gRPC gets the calls whose resets come before the one too many.
        Case{"reset_sessions", kRefused, kManyCalls}, Case{"reset_questions", kRefused, kManyCalls},
        Case{"reset_unknown", kRefused, kManyCalls}, Case{"reset_and_close", kRefused, kManyCalls},
        Case{"headers", kRefused}, Case{"slow_headers", kRefused},
        Case{"indexed_headers", kRefused}, Case{"indexed_calls", kRefused},
        Case{"copied_headers", kRefused}, Case{"trailers", kRefused}, Case{"empty_data", kRefused},
        Case{"small_data", kRefused}, Case{"nothings", kRefused}, Case{"long_headers", kRefused},
        Case{"long_unknown_headers", kRefused}),
    [](const auto& one) { return one.param.attack; });

}  // namespace
}  // namespace gradsync::attack
