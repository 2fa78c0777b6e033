// No call returns to the trainer while its state is read.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "client/src/connection.h"
#include "client/src/layout_registration.h"
#include "client/src/state_reader.h"
#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"
#include "tests/client/job_of_threads.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync {
namespace {

using client::Connection;
using client::StateReader;

// Long enough for a busy machine, short beside the time that reading the state would take.
constexpr absl::Duration kPatience = absl::Seconds(20);

// Zeros that nobody hashes in the time of a test, and that take no memory.
class EndlessState final : public TrainerState {
 public:
  EndlessState()
      : data_(
            mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~EndlessState() override { munmap(data_, kBytes); }

  absl::StatusOr<std::vector<StateItem>> Read() override {
    reading_ = true;
    ++reads_;
    return std::vector<StateItem>{{"endless", data_, kBytes}};
  }
  void Done() override { reading_ = false; }

  bool reading() const { return reading_; }
  int reads() const { return reads_; }
  // Returns when the state is read for the `count`th time.
  void AwaitReads(int count) const {
    const absl::Time deadline = absl::Now() + kPatience;
    while (reads_ < count && absl::Now() < deadline) std::this_thread::yield();
    ASSERT_EQ(reads_, count);
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 40;
  void* const data_;
  std::atomic<bool> reading_{false};
  std::atomic<int> reads_{0};
};

// Rank 0 of two, for whose state the test asks in the daemon's place.
class StatePinTest : public testing::Test {
 protected:
  StatePinTest() {
    const LayoutSpec spec = FloatBuckets(1, 4);
    OnEveryRank(2, [&](std::uint32_t rank) {
      if (rank == 1) {
        auto session = Session::Join(OptionsOf(daemon_, 1, 2));
        ASSERT_TRUE(session.ok()) << session.status();
        other_session_ = *std::move(session);
        other_ = *other_session_->RegisterLayout(spec);
        return;
      }
      auto connection = Connection::Open(OptionsOf(daemon_, 0, 2));
      ASSERT_TRUE(connection.ok()) << connection.status();
      connection_ = *std::move(connection);
      layout_ = *client::RegisterLayout(connection_, spec, /*old=*/nullptr);
    });
    EXPECT_TRUE(reader().Serve(state_).ok());
    Ask(1);
  }
  ~StatePinTest() override { connection_->Close(); }

  StateReader& reader() { return connection_->state_reader(); }
  void Ask(std::uint64_t transfer) {
    v1::SessionResponse response;
    response.mutable_state_question()->set_transfer(transfer);
    connection_->OnMessage(response);
  }
  // Runs `wait` while the state is read, and `end`, which ends the wait. Returns the wait's result.
  absl::Status WhileItIsRead(const std::function<absl::Status()>& wait,
                             const std::function<void()>& end) {
    auto waiting = std::async(std::launch::async, [&] {
      const absl::Status status = wait();
      EXPECT_EQ(state_->reading(), other_wait_);
      return status;
    });
    state_->AwaitReads(++reads_);
    end();
    return waiting.get();
  }
  std::function<absl::Status()> WaitStep(absl::Duration timeout = absl::InfiniteDuration()) {
    return [=] { return layout_->WaitStep(1, timeout).status(); };
  }
  std::function<absl::Status()> WaitBucket(absl::Duration timeout = absl::InfiniteDuration()) {
    return [=] { return layout_->WaitBucket(1, 0, timeout); };
  }
  void MarkAndEnd() { ASSERT_TRUE(MarkAllAndEnd(layout_.get(), 1).ok()); }
  // The other rank's part of the step, after which there is a verdict.
  void Complete() { EXPECT_TRUE(MarkAllAndEnd(other_.get(), 1).ok()); }
  void MakeVoid() { EXPECT_TRUE(other_->AbandonStep(1, "out of memory").ok()); }
  // Another wait of the rank lasts until the end of the test.
  void BeginOtherWait() { reader().Freeze(); }

  const TestDaemon daemon_;
  const std::shared_ptr<EndlessState> state_ = std::make_shared<EndlessState>();
  std::shared_ptr<Connection> connection_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<Session> other_session_;
  std::unique_ptr<Layout> other_;
  int reads_ = 0;
  // After a wait the state is still read, because another wait lasts.
  bool other_wait_ = false;
};

TEST_F(StatePinTest, EndStepFreezesTheState) {
  ASSERT_TRUE(layout_->MarkReady(1, 0).ok());
  EXPECT_EQ(state_->reads(), 0) << "the state may still change";
  ASSERT_TRUE(layout_->EndStep(1).ok());
  state_->AwaitReads(1);
}

TEST_F(StatePinTest, VerdictComesAfterTheReading) {
  MarkAndEnd();
  BeginOtherWait();
  EXPECT_TRUE(WhileItIsRead(WaitStep(), [this] { Complete(); }).ok());
}

TEST_F(StatePinTest, VoidVerdictComesAfterTheReading) {
  BeginOtherWait();
  EXPECT_EQ(ErrorReason(WhileItIsRead(WaitStep(), [this] { MakeVoid(); })), reason::kStepAbandoned);
}

TEST_F(StatePinTest, VoidVerdictOfABucketComesAfterTheReading) {
  BeginOtherWait();
  EXPECT_EQ(ErrorReason(WhileItIsRead(WaitBucket(), [this] { MakeVoid(); })),
            reason::kStepAbandoned);
}

TEST_F(StatePinTest, BucketComesAfterTheReading) {
  ASSERT_TRUE(layout_->MarkReady(1, 0).ok());
  const auto mark = [this] { EXPECT_TRUE(other_->MarkReady(1, 0).ok()); };
  EXPECT_TRUE(WhileItIsRead(WaitBucket(), mark).ok());
}

TEST_F(StatePinTest, BucketDoesNotEndTheReadingOfAnotherWait) {
  ASSERT_TRUE(layout_->MarkReady(1, 0).ok());
  BeginOtherWait();
  other_wait_ = true;
  const auto mark = [this] { EXPECT_TRUE(other_->MarkReady(1, 0).ok()); };
  EXPECT_TRUE(WhileItIsRead(WaitBucket(), mark).ok());
}

TEST_F(StatePinTest, TimeOutComesAfterTheReadingWhichGoesOnInTheNextWait) {
  const absl::Time deadline = absl::Now() + kPatience;
  for (const auto& wait : {WaitStep(absl::Milliseconds(20)), WaitBucket(absl::Milliseconds(20)),
                           WaitStep(absl::Milliseconds(20))}) {
    const int before = state_->reads();
    // On a busy machine a wait may be over before the reader has begun.
    while (state_->reads() == before && absl::Now() < deadline) {
      EXPECT_EQ(ErrorReason(wait()), reason::kWaitTimeout);
      EXPECT_FALSE(state_->reading());
    }
    EXPECT_GT(state_->reads(), before);
  }
}

TEST_F(StatePinTest, TimeOutDoesNotEndTheReadingOfAnotherWait) {
  BeginOtherWait();
  state_->AwaitReads(1);
  EXPECT_EQ(ErrorReason(WaitStep(absl::Milliseconds(20))()), reason::kWaitTimeout);
  EXPECT_TRUE(state_->reading());
  EXPECT_EQ(state_->reads(), 1);
}

TEST_F(StatePinTest, PollNeitherBeginsNorEndsAReading) {
  EXPECT_EQ(ErrorReason(WaitStep(absl::ZeroDuration())()), reason::kWaitTimeout);
  EXPECT_EQ(state_->reads(), 0);
  MarkAndEnd();
  state_->AwaitReads(1);
  EXPECT_EQ(ErrorReason(WaitStep(absl::ZeroDuration())()), reason::kWaitTimeout);
  EXPECT_TRUE(state_->reading());
  EXPECT_EQ(state_->reads(), 1);
}

TEST_F(StatePinTest, PollThatGetsTheVerdictReturnsAfterTheReading) {
  MarkAndEnd();
  state_->AwaitReads(1);
  Complete();
  while (ErrorReason(WaitStep(absl::ZeroDuration())()) == reason::kWaitTimeout) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(state_->reading());
}

TEST_F(StatePinTest, InterruptReturnsAfterTheReadingAlthoughTheWaitLasts) {
  const absl::Status status = WhileItIsRead(WaitStep(), [this] {
    reader().Interrupt();
    EXPECT_FALSE(state_->reading());
    MakeVoid();
  });
  EXPECT_EQ(ErrorReason(status), reason::kStepAbandoned);
  EXPECT_EQ(state_->reads(), 1);
}

TEST_F(StatePinTest, AbandonStepReturnsAfterTheReading) {
  const absl::Status status = WhileItIsRead(WaitBucket(), [this] {
    EXPECT_TRUE(layout_->AbandonStep(1, "no more").ok());
    EXPECT_FALSE(state_->reading());
  });
  EXPECT_EQ(ErrorReason(status), reason::kStepAbandoned);
}

TEST_F(StatePinTest, AbandonStepOfAnEndedStepEndsTheReading) {
  MarkAndEnd();
  state_->AwaitReads(1);
  EXPECT_FALSE(layout_->AbandonStep(1, "no more").ok());
  EXPECT_FALSE(state_->reading());
}

TEST_F(StatePinTest, EndOfTheSessionComesAfterTheReading) {
  MarkAndEnd();
  BeginOtherWait();
  const absl::Status status = WhileItIsRead(WaitStep(), [this] {
    connection_->Close();
    EXPECT_FALSE(state_->reading());
  });
  EXPECT_EQ(ErrorReason(status), reason::kClosed);
}

TEST_F(StatePinTest, EndOfTheSessionEndsTheReadingAlthoughNobodyWaits) {
  MarkAndEnd();
  state_->AwaitReads(1);
  connection_->Close();
  EXPECT_FALSE(state_->reading());
}

TEST_F(StatePinTest, LayoutIsDestroyedAfterTheReading) {
  MarkAndEnd();
  state_->AwaitReads(1);
  layout_ = nullptr;
  EXPECT_FALSE(state_->reading());
}

// How much later rank 0 gets a verdict than rank 1, which nobody reads.
TEST_F(StatePinTest, VerdictIsLateByAtMostATenthOfASecond) {
  constexpr std::uint64_t kSteps = 200;
  const std::uint64_t since_ns = NowNs();
  std::vector<absl::Duration> delays;
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    Ask(step);
    ASSERT_TRUE(MarkAllAndEnd(layout_.get(), step).ok());
    state_->AwaitReads(static_cast<int>(step));
    auto waiting = std::async(std::launch::async, [&] {
      EXPECT_TRUE(layout_->WaitStep(step).ok());
      return absl::Now();
    });
    ASSERT_TRUE(MarkAllAndEnd(other_.get(), step).ok());
    EXPECT_TRUE(other_->WaitStep(step).ok());
    const absl::Time first = absl::Now();
    delays.push_back(waiting.get() - first);
  }
  std::sort(delays.begin(), delays.end());
  std::cout << "delay of a verdict by a reader: p50 " << delays[kSteps / 2] << ", p99 "
            << delays[kSteps * 99 / 100] << ", at most " << delays.back() << "\n";
  EXPECT_LT(delays[kSteps / 2],
            absl::Nanoseconds(FairBoundNs(100'000'000, since_ns, /*share=*/0.5)));
}

}  // namespace
}  // namespace gradsync
