#include "daemon/app/stop_guard.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/time/time.h"
#include "tests/kit/gate.h"

namespace gradsync::daemon {
namespace {

TEST(StopGuardTest, NamesTheStageThatHangs) {
  Gate called;
  std::string hung;
  StopGuard guard([&](const char* stage) {
    hung = stage;
    called.Open();
  });
  guard.Enter("draining");
  guard.Enter("stopping the workers");
  guard.Allow(absl::Milliseconds(1));
  called.Wait();
  EXPECT_EQ(hung, "stopping the workers");
}

TEST(StopGuardTest, LaterLimitReplacesALongerOne) {
  Gate called;
  StopGuard guard([&](const char*) { called.Open(); });
  guard.Allow(absl::Hours(1));
  guard.Allow(absl::Milliseconds(1));
  called.Wait();
}

TEST(StopGuardTest, StopThatEndsInTimeIsNoHang) {
  bool hung = false;
  {
    StopGuard guard([&](const char*) { hung = true; });
    guard.Enter("draining");
    guard.Allow(absl::Hours(1));
  }
  EXPECT_FALSE(hung);
}

TEST(StopGuardTest, NothingHangsBeforeTheFirstLimit) {
  bool hung = false;
  {
    StopGuard guard([&](const char*) { hung = true; });
    guard.Enter("serving");
  }
  EXPECT_FALSE(hung);
}

}  // namespace
}  // namespace gradsync::daemon
