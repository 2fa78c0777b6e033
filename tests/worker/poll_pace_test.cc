#include "daemon/worker/poll_pace.h"

#include <gmock/gmock.h>

namespace gradsync::daemon {
namespace {

// The looks of a wait that lasts `wait_ns`, and by how much the last one is late.
struct Wait {
  std::uint64_t looks = 0;
  std::uint64_t late_ns = 0;
};

Wait WaitFor(std::uint64_t wait_ns) {
  constexpr std::uint64_t kStart = 5'000'000'000;
  PollPace pace;
  pace.Restart(kStart);
  std::uint64_t now_ns = kStart;
  Wait wait;
  for (; now_ns < kStart + wait_ns; ++wait.looks) now_ns += pace.PauseNs(now_ns);
  wait.late_ns = now_ns - kStart - wait_ns;
  return wait;
}

TEST(PollPace, IsLateByAShareOfTheWait) {
  for (std::uint64_t wait_ns = 1'000; wait_ns < 1'000'000'000; wait_ns += wait_ns / 7 + 1) {
    EXPECT_LE(WaitFor(wait_ns).late_ns, std::clamp<std::uint64_t>(wait_ns / 16, 10'000, 100'000))
        << wait_ns;
  }
}

TEST(PollPace, LongWaitCostsFewLooks) {
  EXPECT_EQ(WaitFor(100'000).looks, 10u);         // a kernel: every 10 us
  EXPECT_LE(WaitFor(100'000'000).looks, 1'100u);  // a backward pass
}

TEST(PollPace, RestartsWithEachWait) {
  PollPace pace;
  pace.Restart(0);
  EXPECT_EQ(pace.PauseNs(1'000'000'000), PollPace::kMostNs);
  pace.Restart(1'000'000'000);
  EXPECT_EQ(pace.PauseNs(1'000'000'000), PollPace::kLeastNs);
}

}  // namespace
}  // namespace gradsync::daemon
