#include "client/src/step_client.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
#include <thread>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"
#include "tests/kit/thread_sleep.h"

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

// A thread that waits for the only bucket of step 1. The test plays the daemon; every step is void.
class WaiterForStepOne {
 public:
  // Returns when the thread sleeps.
  WaiterForStepOne() {
    LayoutPlan plan;
    plan.buckets.resize(1);
    steps_ = std::make_unique<StepClient>(std::make_shared<Connection>(SessionOptions()), 1,
                                          "default", plan, nullptr, page_);
    steps_->Begin(1);
    thread_ = std::thread([this] {
      waiting_ = ThisThread();
      status_ = steps_->WaitBucket(1, 0, absl::InfiniteDuration());
      returned_ = true;
    });
    while (waiting_ == 0) std::this_thread::yield();
    AwaitSleep(waiting_);
  }

  // The messages about the steps up to `last`.
  void SendVerdicts(std::uint32_t last) {
    for (std::uint32_t step = 1; step <= last; ++step) steps_->OnStepDone(VoidStep(step));
  }
  // The words of step `last`. Wakes the thread, and returns when it sleeps again or has returned.
  void WriteWords(std::uint32_t last) {
    auto& header = *reinterpret_cast<SemaphorePageHeader*>(page_->data());
    auto& semaphore = *reinterpret_cast<BucketSemaphore*>(page_->data() + sizeof(header));
    header.void_step = last;
    semaphore.done = last;
    syscall(SYS_futex, &semaphore.done, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    AwaitSleep(waiting_, &returned_);
  }
  // The result of the wait.
  absl::Status Join() {
    thread_.join();
    return status_;
  }

 private:
  const std::shared_ptr<MappedMemory> page_ = OnePage();
  std::unique_ptr<StepClient> steps_;
  std::atomic<pid_t> waiting_{0};
  std::atomic<bool> returned_{false};
  absl::Status status_;
  std::thread thread_;
};

// The result of a wait for step 1 that wakes up only when the steps up to `last` are void.
absl::Status LateWait(std::uint32_t last) {
  WaiterForStepOne waiter;
  waiter.SendVerdicts(last);
  waiter.WriteWords(last);
  return waiter.Join();
}

TEST(StepClientTest, LateWaiterSeesVoidOrStaleStep) {
  EXPECT_EQ(ErrorReason(LateWait(2)), reason::kStepVoid);
  // So late that the verdict is not kept any more.
  EXPECT_EQ(ErrorReason(LateWait(20)), reason::kStaleStep);
}

// Words arrive before messages. Those of step 2 do not say that step 1 was void too.
TEST(StepClientTest, WaiterThatALaterVoidStepReleasesWaitsForItsOwnVerdict) {
  WaiterForStepOne waiter;
  waiter.WriteWords(2);
  waiter.SendVerdicts(2);
  EXPECT_EQ(ErrorReason(waiter.Join()), reason::kStepVoid);
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
