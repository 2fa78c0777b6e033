#include "tests/kit/test_daemon.h"

#include <stdexcept>

#include "gmock/gmock.h"
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
  const auto body = [] {
    const TestDaemon daemon({"--no_such_option=1"});
    daemon.Status();  // would wait
  };
  EXPECT_THAT(body,
              testing::ThrowsMessage<std::runtime_error>(testing::HasSubstr("no_such_option")));
  EXPECT_LT(NowNs() - start_ns, std::uint64_t{kPatienceMs} * 1'000'000 / 2);
}

}  // namespace
}  // namespace gradsync
