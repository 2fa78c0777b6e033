#include "tests/kit/test_daemon.h"

#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

TEST(TestDaemon, ServesUntilItStops) {
  TestDaemon daemon;
  EXPECT_EQ(daemon.Status().jobs_size(), 0);
  EXPECT_EQ(daemon.Stop(), 0);
}

TEST(TestDaemon, FailsTheTestAtOnceIfItCannotStart) {
  const std::uint64_t start_ns = NowNs();
  EXPECT_NONFATAL_FAILURE(TestDaemon daemon({"--no_such_option=1"}), "no_such_option");
  EXPECT_LT(NowNs() - start_ns, std::uint64_t{kPatienceMs} * 1'000'000 / 2);
}

}  // namespace
}  // namespace gradsync
