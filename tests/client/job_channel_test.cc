// Barrier, Broadcast and AllReduce, against a real daemon; those of a replacement against one that
// sends what the test says.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/include/gradsync/client.h"
#include "client/src/unix_socket.h"
#include "gmock/gmock.h"
#include "gradsync/shared_memory.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"
#include "tests/client/scripted_daemon.h"
#include "tests/kit/thread_sleep.h"

namespace gradsync {
namespace {

class JobChannelTest : public testing::Test {
 protected:
  Session& session(std::uint32_t rank) { return *job_.sessions[rank]; }

  const TestDaemon daemon_;
  const JobOfThreads job_ = JoinAll(daemon_, 3, nullptr);
};

TEST_F(JobChannelTest, BroadcastMayExceedTheStagingMemory) {
  // Two chunks and a part of the default 32 MiB, and not a multiple of anything.
  std::vector<std::uint32_t> sent((70u << 20) / sizeof(std::uint32_t) + 3);
  std::iota(sent.begin(), sent.end(), 1u);
  OnEveryRank(3, [&](std::uint32_t rank) {
    std::vector<std::uint32_t> data = rank == 1 ? sent : std::vector<std::uint32_t>(sent.size());
    const absl::Status status =
        session(rank).Broadcast(data.data(), data.size() * sizeof(std::uint32_t), 1);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(data == sent);
  });
}

TEST_F(JobChannelTest, LowestLiveRankIsTheRootOnEveryRank) {
  // More than the staging memory holds, so the broadcast has several chunks.
  constexpr std::size_t kCount = (40u << 20) / sizeof(std::uint32_t);
  const auto broadcast = [&](std::uint32_t rank, std::uint32_t root) {
    std::vector<std::uint32_t> data(kCount, rank);
    const absl::Status status =
        session(rank).Broadcast(data.data(), data.size() * sizeof(std::uint32_t), kLowestLiveRank);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(data == std::vector<std::uint32_t>(kCount, root)) << rank;
    EXPECT_TRUE(session(rank).Broadcast(nullptr, 0, kLowestLiveRank).ok());
  };
  OnEveryRank(3, [&](std::uint32_t rank) { broadcast(rank, 0); });
  OnEveryRank(3, [&](std::uint32_t rank) {
    if (rank > 0) broadcast(rank, 1);
    EXPECT_TRUE(session(rank).LeaveAndStay().ok());
    broadcast(rank, 0);
  });
}

TEST_F(JobChannelTest, BroadcastMayBeSmallOrEmpty) {
  OnEveryRank(3, [&](std::uint32_t rank) {
    for (std::uint32_t root = 0; root < 3; ++root) {
      char byte = rank == root ? 'x' : '.';
      EXPECT_TRUE(session(rank).Broadcast(&byte, 1, root).ok());
      EXPECT_EQ(byte, 'x');
      EXPECT_TRUE(session(rank).Broadcast(nullptr, 0, root).ok());
    }
  });
}

TEST_F(JobChannelTest, AllReduceSumsAndAverages) {
  OnEveryRank(3, [&](std::uint32_t rank) {
    std::vector<double> values = {1.0 * rank, 0.5, -3.0};
    ASSERT_TRUE(session(rank)
                    .AllReduce(values.data(), values.size(), DataType::kFloat64, ReduceOp::kSum)
                    .ok());
    EXPECT_THAT(values, testing::ElementsAre(3.0, 1.5, -9.0));
    float mean = static_cast<float>(rank);
    ASSERT_TRUE(session(rank).AllReduce(&mean, 1, DataType::kFloat32, ReduceOp::kAverage).ok());
    EXPECT_EQ(mean, 1.0f);
    EXPECT_TRUE(session(rank).AllReduce(nullptr, 0, DataType::kFloat32, ReduceOp::kSum).ok());
  });
}

TEST_F(JobChannelTest, AllReduceTakesIntegersMinimaAndMaxima) {
  OnEveryRank(3, [&](std::uint32_t rank) {
    std::vector<std::uint8_t> bytes = {static_cast<std::uint8_t>(100 + rank), 7};
    ASSERT_TRUE(session(rank).AllReduce(bytes.data(), 2, DataType::kUint8, ReduceOp::kSum).ok());
    EXPECT_THAT(bytes, testing::ElementsAre(303 - 256, 21));
    std::vector<std::int64_t> large = {(std::int64_t{1} << 40) * rank, -1 - std::int64_t{rank}};
    ASSERT_TRUE(session(rank).AllReduce(large.data(), 2, DataType::kInt64, ReduceOp::kMax).ok());
    EXPECT_THAT(large, testing::ElementsAre(std::int64_t{1} << 41, -1));
    std::vector<float> values = {1.0f + static_cast<float>(rank), -2.0f * static_cast<float>(rank)};
    ASSERT_TRUE(session(rank).AllReduce(values.data(), 2, DataType::kFloat32, ReduceOp::kMin).ok());
    EXPECT_THAT(values, testing::ElementsAre(1.0f, -4.0f));
    const float lone[] = {1, std::nanf(""), 3};
    float value = lone[rank];
    ASSERT_TRUE(session(rank).AllReduce(&value, 1, DataType::kFloat32, ReduceOp::kMax).ok());
    EXPECT_TRUE(std::isnan(value)) << value;
  });
}

TEST_F(JobChannelTest, BadArgumentsAreRefusedLocally) {
  OnEveryRank(3, [&](std::uint32_t rank) {
    char byte = 0;
    for (const absl::Status& status :
         {session(rank).Broadcast(&byte, 1, 3), session(rank).Broadcast(nullptr, 1, 0),
          session(rank).AllReduce(&byte, 1, static_cast<DataType>(10), ReduceOp::kSum),
          session(rank).AllReduce(&byte, 1, DataType::kFloat32, static_cast<ReduceOp>(9)),
          session(rank).AllReduce(&byte, 1, DataType::kInt8, ReduceOp::kAverage),
          session(rank).AllReduce(nullptr, 1, DataType::kFloat32, ReduceOp::kSum),
          session(rank).AllReduce(&byte, 1u << 24, DataType::kFloat32, ReduceOp::kSum)}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_EQ(ErrorReason(status), "MALFORMED");
    }
    EXPECT_TRUE(session(rank).Barrier().ok());
  });
}

TEST_F(JobChannelTest, CallsOfSeveralThreadsAreSerialized) {
  OnEveryRank(3, [&](std::uint32_t rank) {
    OnEveryRank(4, [&](std::uint32_t) {
      for (int i = 0; i < 25; ++i) EXPECT_TRUE(session(rank).Barrier().ok());
    });
  });
}

// The daemon does not answer the first operation before the test says so.
TEST(OperationTurnTest, TimeoutCountsTheWaitForAnOperationOfAnotherThread) {
  v1::SessionOpened opened;
  opened.set_staging_bytes(4096);
  ScriptedDaemon daemon(opened);
  SessionOptions options;
  options.socket = daemon.socket();
  options.job_id = "scripted";
  options.world_size = 2;
  auto joined = Session::Join(options);
  ASSERT_TRUE(joined.ok()) << joined.status();
  Session& session = **joined;
  auto first = std::async(std::launch::async, [&session] { return session.Barrier(); });
  const auto request = daemon.Next();
  EXPECT_TRUE(request.has_value() && request->has_barrier());
  float value = 0;
  for (const absl::Status& status :
       {session.Barrier(absl::Milliseconds(1)),
        session.Broadcast(&value, sizeof(value), 0, absl::Milliseconds(1)),
        session.AllReduce(&value, 1, DataType::kFloat32, ReduceOp::kSum, absl::Milliseconds(1)),
        session.LeaveAndStay(absl::ZeroDuration()).status()}) {
    ExpectError(status, absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("has not begun"));
  }
  EXPECT_TRUE(daemon.Silent());
  v1::SessionResponse done;
  done.mutable_operation_done()->set_sequence(1);
  daemon.Say(done);
  const absl::Status status = first.get();
  EXPECT_TRUE(status.ok()) << status;
}

// A session that takes the place of a lost one, and brings its state itself.
class ReplacementTest : public testing::Test {
 protected:
  explicit ReplacementTest(std::uint64_t lease_ms = 0) : daemon_(Opened(lease_ms)) {
    SessionOptions options;
    options.socket = daemon_.socket();
    options.job_id = "scripted";
    options.world_size = 2;
    options.on_rank_loss = LossPolicy::kHold;
    options.state_source = StateSource::kTrainer;
    auto joined = Session::Join(options);
    EXPECT_TRUE(joined.ok()) << joined.status();
    if (joined.ok()) session_ = *std::move(joined);
  }

  static v1::SessionOpened Opened(std::uint64_t lease_ms) {
    v1::SessionOpened opened;
    opened.set_replacement(true);
    opened.set_staging_bytes(4096);
    opened.set_lease_ms(lease_ms);
    return opened;
  }
  static client::FileDescriptor Memory(std::uint64_t bytes) {
    client::FileDescriptor memory(memfd_create("layout", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(memory.get(), static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    return memory;
  }
  // A layout of one bucket, whose steps begin with 1.
  std::unique_ptr<Layout> Register(std::uint32_t channel) {
    constexpr std::uint64_t kCount = 4;
    const std::string nonce = "scripted layout" + std::to_string(channel);
    const auto arena = Memory(kBucketAlignment);
    const auto semaphores = Memory(SemaphoreBytes(1));
    LayoutSpec spec = FloatBuckets(1, kCount);
    spec.name = nonce;
    auto registering =
        std::async(std::launch::async, [&] { return session_->RegisterLayout(spec); });
    daemon_.Offer(nonce, {arena.get(), semaphores.get()});
    v1::SessionResponse response;
    v1::LayoutAssigned& assigned = *response.mutable_layout_assigned();
    assigned.set_request_id(Next().register_layout().request_id());
    assigned.set_channel(channel);
    assigned.set_nonce(nonce);
    assigned.set_arena_bytes(kBucketAlignment);
    assigned.add_buckets()->set_dtype(v1::DATA_TYPE_FLOAT32);
    assigned.mutable_buckets(0)->set_count(kCount);
    daemon_.Say(response);
    EXPECT_TRUE(Next().has_arena_mapped());
    response.mutable_layout_ready()->set_channel(channel);
    response.mutable_layout_ready()->set_first_step(1);
    daemon_.Say(response);
    auto layout = registering.get();
    EXPECT_TRUE(layout.ok()) << layout.status();
    return layout.ok() ? *std::move(layout) : nullptr;
  }
  v1::SessionRequest Next() {
    auto request = daemon_.Next();
    EXPECT_TRUE(request.has_value());
    return request.value_or(v1::SessionRequest());
  }
  void End(Layout* layout, std::uint64_t step) {
    const absl::Status ended = layout->FinishStep(step);
    EXPECT_TRUE(ended.ok()) << ended;
    EXPECT_EQ(Next().end_step().step(), step);
  }
  void SayDone(std::uint32_t channel, std::uint64_t step, v1::Verdict verdict) {
    v1::SessionResponse response;
    response.mutable_step_done()->set_channel(channel);
    response.mutable_step_done()->set_step(step);
    response.mutable_step_done()->set_verdict(verdict);
    daemon_.Say(response);
  }
  // The daemon lets the session take part in operations, from number 7 on.
  void SayHealed() {
    v1::SessionResponse response;
    response.mutable_healed()->set_next_sequence(7);
    daemon_.Say(response);
  }
  // A call of Barrier that waits already, or has returned.
  std::future<absl::Status> CallBarrier() {
    std::promise<pid_t> thread;
    auto id = thread.get_future();
    const auto returned = std::make_shared<std::atomic<bool>>(false);
    auto called =
        std::async(std::launch::async, [this, returned, thread = std::move(thread)]() mutable {
          thread.set_value(ThisThread());
          const absl::Status status = session_->Barrier();
          *returned = true;
          return status;
        });
    AwaitSleep(id.get(), returned.get());
    return called;
  }
  // The call sends barrier 7, which is done.
  void ExpectBarrier(std::future<absl::Status> called) {
    const v1::SessionRequest request = Next();
    EXPECT_EQ(request.barrier().sequence(), 7u) << request.DebugString();
    v1::SessionResponse done;
    done.mutable_operation_done()->set_sequence(7);
    daemon_.Say(done);
    const absl::Status status = called.get();
    EXPECT_TRUE(status.ok()) << status;
  }
  static void ExpectRefused(const absl::Status& status) {
    ExpectError(status, absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  }

  ScriptedDaemon daemon_;
  std::unique_ptr<Session> session_;
};

TEST_F(ReplacementTest, BarrierAfterTheFirstEndStepWaitsUntilTheRankIsLive) {
  const auto layout = Register(1);
  ExpectRefused(session_->Barrier());
  End(layout.get(), 1);
  auto called = CallBarrier();
  EXPECT_TRUE(daemon_.Silent()) << "the rank is not live";
  SayDone(1, 1, v1::VERDICT_COMPLETE);
  SayHealed();
  ExpectBarrier(std::move(called));
}

TEST_F(ReplacementTest, BarrierOfAVoidStepIsRefusedAndThatOfTheNextOneWaits) {
  const auto layout = Register(1);
  End(layout.get(), 1);
  auto called = CallBarrier();
  SayDone(1, 1, v1::VERDICT_VOID);
  ExpectRefused(called.get());
  ExpectRefused(session_->Barrier());
  End(layout.get(), 2);
  called = CallBarrier();
  SayDone(1, 2, v1::VERDICT_COMPLETE);
  SayHealed();
  ExpectBarrier(std::move(called));
}

TEST_F(ReplacementTest, BarrierWaitsWhileAStepOfAnyLayoutMayBeComplete) {
  const auto first = Register(1);
  const auto second = Register(2);
  End(first.get(), 1);
  End(second.get(), 1);
  auto called = CallBarrier();
  SayDone(1, 1, v1::VERDICT_VOID);
  SayDone(2, 1, v1::VERDICT_COMPLETE);
  // It owes something to a layout, so it is not live yet.
  EXPECT_FALSE(first->WaitStep(1, absl::Seconds(15)).ok());
  End(first.get(), 2);
  SayDone(1, 2, v1::VERDICT_VOID);
  SayHealed();
  ExpectBarrier(std::move(called));
}

TEST_F(ReplacementTest, BarrierThatHasNotBegunInTimeMayBeCalledAgain) {
  const auto layout = Register(1);
  End(layout.get(), 1);
  ExpectError(session_->Barrier(absl::Milliseconds(1)), absl::StatusCode::kDeadlineExceeded,
              "WAIT_TIMEOUT");
  EXPECT_TRUE(daemon_.Silent());
  SayDone(1, 1, v1::VERDICT_COMPLETE);
  SayHealed();
  ExpectBarrier(CallBarrier());
}

TEST_F(ReplacementTest, EndOfTheSessionEndsTheWaitForABarrier) {
  const auto layout = Register(1);
  End(layout.get(), 1);
  auto called = CallBarrier();
  daemon_.Die();
  ExpectError(called.get(), absl::StatusCode::kUnavailable, "DAEMON_LOST");
}

class ReplacementWithShortLeaseTest : public ReplacementTest {
 protected:
  ReplacementWithShortLeaseTest() : ReplacementTest(/*lease_ms=*/100) {}
};

TEST_F(ReplacementWithShortLeaseTest, SilentDaemonEndsTheWaitForABarrier) {
  const auto layout = Register(1);
  End(layout.get(), 1);
  ExpectError(session_->Barrier(), absl::StatusCode::kUnavailable, "DAEMON_SILENT");
  EXPECT_TRUE(daemon_.Silent());
}

}  // namespace
}  // namespace gradsync
