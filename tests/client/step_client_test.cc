#include "client/src/step_client.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <thread>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"
#include "tests/client/thread_sleep.h"

namespace gradsync::client {
namespace {

std::shared_ptr<MappedMemory> OnePage() {
  const int memfd = memfd_create("semaphores", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(ftruncate(memfd, SemaphoreBytes(1)), 0);
  EXPECT_EQ(fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  auto mapped = MappedMemory::Map(memfd, SemaphoreBytes(1), "semaphores");
  close(memfd);
  EXPECT_TRUE(mapped.ok()) << mapped.status();
  return *std::move(mapped);
}

v1::StepDone VoidStep(std::uint64_t step) {
  v1::StepDone done;
  done.set_step(step);
  return done;
}

// Waits for step 1, which becomes void. The wait wakes up only when the steps up to `last` are void
// too. Returns its result.
absl::Status LateWait(std::uint32_t last) {
  const auto connection = std::make_shared<Connection>(SessionOptions());
  const auto page = OnePage();
  LayoutPlan plan;
  plan.buckets.resize(1);
  StepClient steps(connection, 1, "default", plan, nullptr, page);
  steps.Begin(1);
  auto& header = *reinterpret_cast<SemaphorePageHeader*>(page->data());
  auto& semaphore = *reinterpret_cast<BucketSemaphore*>(page->data() + sizeof(header));

  std::atomic<pid_t> waiting{0};
  absl::Status status;
  std::thread waiter([&] {
    waiting = ThisThread();
    status = steps.WaitBucket(1, 0, absl::InfiniteDuration());
  });
  while (waiting == 0) std::this_thread::yield();
  AwaitSleep(waiting);
  for (std::uint32_t step = 1; step <= last; ++step) steps.OnStepDone(VoidStep(step));
  header.void_step = last;
  semaphore.done = last;
  syscall(SYS_futex, &semaphore.done, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  waiter.join();
  return status;
}

TEST(StepClientTest, LateWaiterSeesVoidOrStaleStep) {
  EXPECT_EQ(ErrorReason(LateWait(2)), reason::kStepVoid);
  // So late that the verdict is not kept any more.
  EXPECT_EQ(ErrorReason(LateWait(20)), reason::kStaleStep);
}

// A replacement does not mark before it has the state of the model.
TEST(StepClientTest, RankWithoutTheStateMarksNothing) {
  SessionOptions options;
  options.state_source = StateSource::kSurvivor;
  const auto connection = std::make_shared<Connection>(options);
  v1::SessionResponse opened;
  opened.mutable_session_opened()->set_replacement(true);
  connection->OnMessage(opened);
  LayoutPlan plan;
  plan.buckets.resize(1);
  StepClient steps(connection, 1, "default", plan, nullptr, OnePage());
  steps.Begin(1);
  for (const absl::Status& status : {steps.MarkReady(1, 0), steps.EndStep(1, {}),
                                     steps.FinishStep(1, {}), steps.AbandonStep(1, "")}) {
    EXPECT_EQ(ErrorReason(status), reason::kProtocolViolation) << status;
  }
}

// The session's end reaches its layouts first. A rank that leaves just then must see why it ended.
TEST(StepClientTest, OpenStepOfEndedLayoutGivesTheEnd) {
  LayoutPlan plan;
  plan.buckets.resize(1);
  plan.gradients.resize(1);
  StepClient steps(std::make_shared<Connection>(SessionOptions()), 1, "default", plan, nullptr,
                   OnePage());
  steps.Begin(1);
  EXPECT_TRUE(steps.CheckNoOpenStep("Leave").ok());
  ASSERT_TRUE(steps.MarkUnused(1, 0).ok());
  EXPECT_EQ(ErrorReason(steps.CheckNoOpenStep("Leave")), reason::kProtocolViolation);
  steps.OnSessionEnd(MakeError(absl::StatusCode::kUnavailable, reason::kDaemonLost, "lost"));
  EXPECT_EQ(ErrorReason(steps.CheckNoOpenStep("Leave")), reason::kDaemonLost);
}

}  // namespace
}  // namespace gradsync::client
