// Broadcast, Barrier and small all-reduce on the job's own channel.

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kWindow = 8;  // bytes of staging memory

OperationSpec Barrier() { return {}; }

OperationSpec Broadcast(std::uint32_t root, std::uint64_t bytes) {
  OperationSpec spec;
  spec.kind = OperationKind::kBroadcast;
  spec.root = root;
  spec.bytes = bytes;
  return spec;
}

OperationSpec AllReduce(DataType dtype, std::uint64_t count, ReduceOp op = ReduceOp::kSum) {
  OperationSpec spec;
  spec.kind = OperationKind::kAllReduce;
  spec.dtype = dtype;
  spec.count = count;
  spec.op = op;
  return spec;
}

class OperationChannelTest : public JobFixture {
 protected:
  void Start(std::uint32_t ranks, bool divide_by_world = false) {
    JobFixture::Start(ranks, divide_by_world);
    staging_.clear();
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      staging_.push_back(std::make_shared<Window>());
    }
    next_.assign(ranks, 0);
  }

  // Begins the rank's next operation.
  absl::Status Operate(std::uint32_t rank, const OperationSpec& spec) {
    return job_->Operate(Of(rank), ++next_[rank], spec,
                         {staging_[rank], staging_[rank]->bytes, kWindow}, kForever);
  }
  void OperateAll(const OperationSpec& spec) {
    for (std::uint32_t rank = 0; rank < staging_.size(); ++rank) {
      const absl::Status status = Operate(rank, spec);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void Write(std::uint32_t rank, absl::string_view text) {
    std::memcpy(staging_[rank]->bytes, text.data(), text.size());
  }
  std::string Read(std::uint32_t rank, std::size_t bytes) {
    return std::string(reinterpret_cast<const char*>(staging_[rank]->bytes), bytes);
  }
  float* Floats(std::uint32_t rank) { return reinterpret_cast<float*>(staging_[rank]->bytes); }
  bool AnyStagingShared() const {
    for (const auto& staging : staging_) {
      if (staging.use_count() > 1) return true;
    }
    return false;
  }

  struct Window {
    alignas(64) std::byte bytes[kWindow] = {};
  };
  std::vector<std::shared_ptr<Window>> staging_;
  std::vector<std::uint64_t> next_;
};

TEST_F(OperationChannelTest, BarrierIsDoneWhenTheLastRankCalls) {
  Start(3);
  ASSERT_TRUE(Operate(2, Barrier()).ok());
  ASSERT_TRUE(Operate(0, Barrier()).ok());
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(sink(rank).messages().empty());
  ASSERT_TRUE(Operate(1, Barrier()).ok());
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(Only<OperationDoneMessage>(rank).sequence, 1u);
  }
  EXPECT_FALSE(AnyStagingShared());
  EXPECT_EQ(job_->Snapshot().operations, 1u);
}

TEST_F(OperationChannelTest, BroadcastGoesChunkByChunk) {
  Start(3);
  const std::string tensor = "a tensor of twenty b";
  OperateAll(Broadcast(1, tensor.size()));
  std::string received;
  for (std::uint64_t chunk = 0, sent = 0; sent < tensor.size(); ++chunk) {
    // The root is asked for a chunk first. The others get it after the root has written it.
    EXPECT_EQ(Only<ChunkReadyMessage>(1).chunk, chunk);
    EXPECT_TRUE(sink(0).messages().empty());
    TakeAll();
    const std::string part = tensor.substr(sent, kWindow);
    Write(1, part);
    ASSERT_TRUE(job_->ChunkWritten(Of(1), 1, chunk, part.size()).ok());
    EXPECT_TRUE(sink(0).messages().empty());
    executor_.RunAll();
    for (const std::uint32_t rank : {0, 2}) {
      const auto ready = Only<ChunkReadyMessage>(rank);
      EXPECT_EQ(ready.chunk, chunk);
      EXPECT_EQ(ready.bytes, part.size());
      EXPECT_EQ(Read(rank, part.size()), part);
    }
    received += Read(2, part.size());
    sent += part.size();
    TakeAll();
    ASSERT_TRUE(job_->ChunkRead(Of(2), 1, chunk).ok());
    // The slower rank still reads, so the root is not asked for the next chunk.
    EXPECT_TRUE(sink(1).messages().empty());
    ASSERT_TRUE(job_->ChunkRead(Of(0), 1, chunk).ok());
  }
  EXPECT_EQ(received, tensor);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(sink(rank).messages().size(), 1u);
    EXPECT_EQ(Only<OperationDoneMessage>(rank).sequence, 1u);
  }
  EXPECT_FALSE(AnyStagingShared());
}

TEST_F(OperationChannelTest, SnapshotNamesTheRanksThatOweAChunkEvenAfterTheJobsEnd) {
  using Ranks = std::vector<std::uint32_t>;
  Start(3);
  EXPECT_EQ(job_->Snapshot().waiting_ranks, Ranks{});
  ASSERT_TRUE(Operate(0, Broadcast(0, 4)).ok());
  EXPECT_EQ(job_->Snapshot().waiting_ranks, (Ranks{1, 2}));
  ASSERT_TRUE(Operate(1, Broadcast(0, 4)).ok());
  ASSERT_TRUE(Operate(2, Broadcast(0, 4)).ok());
  EXPECT_EQ(job_->Snapshot().waiting_ranks, Ranks{0});
  ASSERT_TRUE(job_->ChunkWritten(Of(0), 1, 0, 4).ok());
  EXPECT_EQ(job_->Snapshot().waiting_ranks, Ranks{});
  executor_.RunAll();
  EXPECT_EQ(job_->Snapshot().waiting_ranks, (Ranks{1, 2}));
  ASSERT_TRUE(job_->ChunkRead(Of(1), 1, 0).ok());
  Lose(1);
  EXPECT_EQ(job_->Snapshot().waiting_ranks, Ranks{2});
}

// Each receiver's copy, and each few MiB of it, is a turn of its own, so that other users have
// theirs.
TEST_F(OperationChannelTest, BroadcastIsCopiedInPieces) {
  constexpr std::size_t kBytes = (std::size_t{4} << 20) + 5;
  Start(3);
  std::vector<std::shared_ptr<std::vector<std::byte>>> memory;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    memory.push_back(std::make_shared<std::vector<std::byte>>(kBytes));
    const StagingMemory staging{memory[rank], memory[rank]->data(), kBytes};
    ASSERT_TRUE(job_->Operate(Of(rank), 1, Broadcast(0, kBytes), staging, kForever).ok());
  }
  memory[0]->back() = std::byte{7};
  ASSERT_TRUE(job_->ChunkWritten(Of(0), 1, 0, kBytes).ok());
  EXPECT_EQ(executor_.pending(), 4u);
  while (executor_.pending() > 1) executor_.RunNext();
  EXPECT_TRUE(sink(1).messages().empty());
  executor_.RunNext();
  for (const std::uint32_t rank : {1, 2}) {
    EXPECT_EQ(Only<ChunkReadyMessage>(rank).bytes, kBytes);
    EXPECT_EQ(*memory[rank], *memory[0]);
  }
}

TEST_F(OperationChannelTest, BroadcastOfNoBytesOrToNoRankIsDone) {
  Start(2);
  OperateAll(Broadcast(0, 0));
  Only<OperationDoneMessage>(1);
  TakeAll();
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/true).ok());
  ASSERT_TRUE(Operate(0, Broadcast(0, 3)).ok());
  Only<ChunkReadyMessage>(0);
  ASSERT_TRUE(job_->ChunkWritten(Of(0), 2, 0, 3).ok());
  executor_.RunAll();
  Only<OperationDoneMessage>(0);
}

TEST_F(OperationChannelTest, AllReduceAddsInRankOrderInPlace) {
  Start(3);
  Floats(0)[0] = 1e8f;
  Floats(1)[0] = 1.0f;
  Floats(2)[0] = -1e8f;
  for (std::uint32_t rank = 0; rank < 3; ++rank) Floats(rank)[1] = static_cast<float>(rank + 1);
  // The ranks call in another order.
  for (const std::uint32_t rank : {2, 0, 1}) {
    ASSERT_TRUE(Operate(rank, AllReduce(DataType::kFloat32, 2)).ok());
  }
  ASSERT_EQ(reducer_.held().size(), 1u);
  EXPECT_TRUE(sink(0).messages().empty());
  reducer_.CompleteAll();
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    Only<OperationDoneMessage>(rank);
    EXPECT_EQ(Floats(rank)[0], (1e8f + 1.0f) + -1e8f);
    EXPECT_EQ(Floats(rank)[1], 6.0f);
  }
  EXPECT_FALSE(AnyStagingShared());
}

TEST_F(OperationChannelTest, AverageDividesByLiveRanksOrByTheWorld) {
  for (const bool world : {false, true}) {
    sinks_.clear();
    Start(4, world);
    ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/true).ok());
    TakeAll();
    for (const std::uint32_t rank : {1, 2, 3}) {
      Floats(rank)[0] = 12.0f;
      ASSERT_TRUE(Operate(rank, AllReduce(DataType::kFloat32, 1, ReduceOp::kAverage)).ok());
    }
    reducer_.CompleteAll();
    EXPECT_EQ(Floats(3)[0], world ? 9.0f : 36.0f * (1.0f / 3.0f));
  }
}

TEST_F(OperationChannelTest, AllReduceOfNoElementsIsDone) {
  Start(2);
  OperateAll(AllReduce(DataType::kFloat64, 0));
  Only<OperationDoneMessage>(0);
  EXPECT_EQ(reducer_.submitted(), 0u);
}

// Every way in which two ranks can disagree on an operation.
struct Disagreement {
  const char* name;
  OperationSpec first;
  OperationSpec second;
  const char* says;
};

class OperationMismatchTest : public OperationChannelTest,
                              public testing::WithParamInterface<Disagreement> {};

TEST_P(OperationMismatchTest, FailsForEveryRankAndNamesBothCalls) {
  Start(4);
  ASSERT_TRUE(Operate(2, GetParam().first).ok());
  ASSERT_TRUE(Operate(3, GetParam().first).ok());
  ASSERT_TRUE(Operate(1, GetParam().second).ok());
  // The late rank gets the same error, whatever it calls.
  ASSERT_TRUE(Operate(0, GetParam().second).ok());
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(sink(rank).messages().size(), 1u);
    const auto failed = Only<OperationFailedMessage>(rank);
    EXPECT_EQ(failed.sequence, 1u);
    EXPECT_EQ(failed.status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(failed.status), "OPERATION_MISMATCH");
    EXPECT_TRUE(Says(failed.status, GetParam().says)) << failed.status;
    EXPECT_EQ(FieldOf(failed.status, "rank"), "1");
    EXPECT_EQ(FieldOf(failed.status, "other_rank"), "2");
  }
  EXPECT_FALSE(AnyStagingShared());
  EXPECT_EQ(job_->Snapshot().operations_failed, 1u);

  // The next operation can succeed.
  TakeAll();
  OperateAll(Barrier());
  EXPECT_EQ(Only<OperationDoneMessage>(0).sequence, 2u);
}

const Disagreement kDisagreements[] = {
    {"OnTheKind", Barrier(), Broadcast(0, 4),
     "rank 2 called barrier, rank 1 called broadcast of 4 bytes from rank 0"},
    {"OnTheRoot", Broadcast(0, 4), Broadcast(1, 4),
     "rank 2 called broadcast of 4 bytes from rank 0, rank 1 called broadcast of 4 bytes from rank "
     "1"},
    {"OnTheSize", Broadcast(0, 4), Broadcast(0, 5), "rank 1 called broadcast of 5 bytes"},
    {"OnTheType", AllReduce(DataType::kFloat32, 1), AllReduce(DataType::kFloat64, 1),
     "rank 2 called all-reduce (sum) of 1 float32, rank 1 called all-reduce (sum) of 1 float64"},
    {"OnTheCount", AllReduce(DataType::kFloat32, 1), AllReduce(DataType::kFloat32, 2),
     "rank 1 called all-reduce (sum) of 2 float32"},
    {"OnTheOperation", AllReduce(DataType::kFloat32, 1),
     AllReduce(DataType::kFloat32, 1, ReduceOp::kAverage),
     "rank 1 called all-reduce (average) of 1 float32"},
    {"OnTheOrderFreeOperation", AllReduce(DataType::kInt64, 1, ReduceOp::kMin),
     AllReduce(DataType::kInt64, 1, ReduceOp::kMax),
     "rank 2 called all-reduce (min) of 1 int64, rank 1 called all-reduce (max) of 1 int64"},
};

INSTANTIATE_TEST_SUITE_P(Operations, OperationMismatchTest, testing::ValuesIn(kDisagreements),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(OperationChannelTest, RankThatIsBehindGetsEachFailure) {
  Start(2);
  const std::uint64_t deadline_ns = clock_.NowNs() + 10;
  for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
    ASSERT_TRUE(job_->Operate(Of(0), sequence, Broadcast(0, sequence),
                              {staging_[0], staging_[0]->bytes, kWindow}, deadline_ns)
                    .ok());
    clock_.Advance(10);
    job_->Tick();
  }
  for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
    sink(1).Take();
    ASSERT_TRUE(Operate(1, Barrier()).ok());
    const auto failed = Only<OperationFailedMessage>(1);
    EXPECT_EQ(failed.sequence, sequence);
    EXPECT_TRUE(Says(failed.status, absl::StrCat("broadcast of ", sequence, " bytes")))
        << failed.status;
  }
}

TEST_F(OperationChannelTest, RankThatIsTooFarBehindStillGetsAFailure) {
  Start(2);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(job_->Operate(Of(0), ++next_[0], Barrier(), {}, clock_.NowNs()).ok());
    job_->Tick();
  }
  ASSERT_TRUE(Operate(1, Barrier()).ok());
  const auto failed = Only<OperationFailedMessage>(1);
  EXPECT_EQ(failed.sequence, 1u);
  EXPECT_EQ(ReasonOf(failed.status), "OPERATION_TIMEOUT");
}

TEST_F(OperationChannelTest, OperationOutOfSequenceErrorNamesTheNext) {
  Start(2);
  for (const std::uint64_t sequence : {0, 2}) {
    const absl::Status status = job_->Operate(Of(0), sequence, Barrier(), {}, kForever);
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
    EXPECT_TRUE(Says(status, "the next one is 1")) << status;
    EXPECT_TRUE(Says(status, "rank 0")) << status;
  }
  ASSERT_TRUE(Operate(0, Barrier()).ok());
  const absl::Status status = Operate(0, Barrier());
  EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(status, "before the last one was answered")) << status;
}

TEST_F(OperationChannelTest, BroadcastFromAnUnknownRankIsRefused) {
  Start(2);
  EXPECT_EQ(ReasonOf(Operate(0, Broadcast(2, 4))), "UNKNOWN_RANK");
}

TEST_F(OperationChannelTest, ChunksOutOfOrderAreRefused) {
  Start(3);
  const auto refused = [](const absl::Status& status) {
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION") << status;
  };
  ASSERT_TRUE(Operate(0, Broadcast(0, 20)).ok());
  refused(job_->ChunkWritten(Of(0), 1, 0, 8));  // not every rank has called
  ASSERT_TRUE(Operate(1, Broadcast(0, 20)).ok());
  ASSERT_TRUE(Operate(2, Broadcast(0, 20)).ok());
  refused(job_->ChunkWritten(Of(1), 1, 0, 8));  // not the root
  refused(job_->ChunkWritten(Of(0), 1, 1, 8));  // not the next chunk
  refused(job_->ChunkWritten(Of(0), 1, 0, 0));
  refused(job_->ChunkWritten(Of(0), 1, 0, kWindow + 1));
  refused(job_->ChunkRead(Of(1), 1, 0));  // nothing has been written
  ASSERT_TRUE(job_->ChunkWritten(Of(0), 1, 0, 8).ok());
  refused(job_->ChunkWritten(Of(0), 1, 1, 8));  // being copied
  executor_.RunAll();
  refused(job_->ChunkWritten(Of(0), 1, 1, 8));  // being read
  refused(job_->ChunkRead(Of(0), 1, 0));        // the root
  refused(job_->ChunkRead(Of(1), 1, 1));
  ASSERT_TRUE(job_->ChunkRead(Of(1), 1, 0).ok());
  refused(job_->ChunkRead(Of(1), 1, 0));  // twice
  ASSERT_TRUE(job_->ChunkRead(Of(2), 1, 0).ok());
  ASSERT_TRUE(job_->ChunkWritten(Of(0), 1, 1, 8).ok());
  executor_.RunAll();
  ASSERT_TRUE(job_->ChunkRead(Of(1), 1, 1).ok());
  ASSERT_TRUE(job_->ChunkRead(Of(2), 1, 1).ok());
  refused(job_->ChunkWritten(Of(0), 1, 2, 5));  // only four bytes are left
}

TEST_F(OperationChannelTest, LateChunksAreIgnoredAfterATimeout) {
  Start(2);
  const std::uint64_t deadline_ns = clock_.NowNs() + 10;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(job_->Operate(Of(rank), 1, Broadcast(0, 20),
                              {staging_[rank], staging_[rank]->bytes, kWindow}, deadline_ns)
                    .ok());
  }
  ASSERT_TRUE(job_->ChunkWritten(Of(0), 1, 0, 8).ok());
  clock_.Advance(10);
  job_->Tick();
  EXPECT_TRUE(sink(1).messages().empty());  // the copy still runs
  EXPECT_TRUE(job_->ChunkWritten(Of(0), 1, 1, 8).ok());
  executor_.RunAll();
  Only<OperationFailedMessage>(1);
  EXPECT_TRUE(sink(1).Of<ChunkReadyMessage>().empty());
  EXPECT_TRUE(job_->ChunkRead(Of(1), 1, 0).ok());
  EXPECT_FALSE(AnyStagingShared());
}

TEST_F(OperationChannelTest, DoesNotWaitForRanksThatHaveLeft) {
  Start(3);
  ASSERT_TRUE(Operate(0, Barrier()).ok());
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/false).ok());
  EXPECT_TRUE(sink(0).messages().empty());
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  Only<OperationDoneMessage>(0);
  EXPECT_TRUE(sink(1).messages().empty());
}

TEST_F(OperationChannelTest, LastMissingRankMayExit) {
  Start(2);
  ASSERT_TRUE(Operate(0, Barrier()).ok());
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/true).ok());
  Only<OperationDoneMessage>(0);
}

TEST_F(OperationChannelTest, BroadcastFailsIfItsRootHasLeft) {
  Start(3);
  ASSERT_TRUE(Operate(0, Broadcast(2, 4)).ok());
  ASSERT_TRUE(Operate(1, Broadcast(2, 4)).ok());
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  for (const std::uint32_t rank : {0, 1}) {
    const absl::Status status = Only<OperationFailedMessage>(rank).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(Says(status, "rank 2")) << status;
    EXPECT_TRUE(Says(status, "root of the broadcast has left")) << status;
  }
}

TEST_F(OperationChannelTest, LeavingDuringAnOperationIsRefused) {
  Start(2);
  ASSERT_TRUE(Operate(0, Barrier()).ok());
  for (const bool exit : {false, true}) {
    const absl::Status status = job_->Leave(Of(0), exit);
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
    EXPECT_TRUE(Says(status, "operation")) << status;
  }
}

TEST_F(OperationChannelTest, LossDuringACopyIsReportedAfterTheCopy) {
  Start(3);
  OperateAll(Broadcast(0, 4));
  ASSERT_TRUE(job_->ChunkWritten(Of(0), 1, 0, 4).ok());
  TakeAll();
  Lose(1);
  EXPECT_TRUE(sink(0).messages().empty());
  EXPECT_TRUE(sink(1).messages().empty());
  executor_.RunAll();
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(sink(rank).messages().size(), 1u);
    Only<SessionEndMessage>(rank);
  }
  EXPECT_FALSE(AnyStagingShared());
  EXPECT_TRUE(job_->Empty());
}

TEST_F(OperationChannelTest, LossDuringAnAllReduceIsReportedAfterTheReduction) {
  Start(2);
  OperateAll(AllReduce(DataType::kFloat32, 2));
  Lose(1);
  EXPECT_TRUE(sink(0).messages().empty());
  EXPECT_FALSE(job_->Empty());
  reducer_.CompleteAll();
  ASSERT_EQ(sink(0).messages().size(), 1u);
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(0).status), "RANK_LOST");
  EXPECT_FALSE(AnyStagingShared());
}

TEST_F(OperationChannelTest, OperationsAndStepsDoNotWaitForEachOther) {
  Start(2);
  const std::uint32_t channel = Agree(Spec(1));
  ASSERT_TRUE(job_->MarkReady(Of(0), channel, 1, {0}).ok());
  OperateAll(Barrier());
  Only<OperationDoneMessage>(0);
  DoStep(1, channel, 1);
  ASSERT_TRUE(Operate(0, Barrier()).ok());
  ASSERT_TRUE(job_->EndStep(Of(0), channel, 1, "").ok());
  reducer_.CompleteAll();
  Only<StepDoneMessage>(0);
}

TEST_F(OperationChannelTest, FailedReductionEndsTheJob) {
  Start(2);
  OperateAll(AllReduce(DataType::kFloat32, 3));
  ASSERT_EQ(reducer_.held().size(), 1u);
  reducer_.Fail(reducer_.held().front(), absl::UnavailableError("the engine has failed"));
  for (const std::uint32_t rank : {0, 1}) {
    EXPECT_TRUE(sink(rank).Of<OperationDoneMessage>().empty());
    EXPECT_EQ(Only<SessionEndMessage>(rank).status.message(), "the engine has failed");
  }
}

// If each call went through all ranks, that would be more than 4e9 looks for each barrier.
TEST_F(OperationChannelTest, CallsOfAHugeJobAreShort) {
  constexpr std::uint32_t kRanks = 65'536;
  Start(kRanks);
  for (int barrier = 0; barrier < 10; ++barrier) {
    OperateAll(Barrier());
    for (const auto& sink : sinks_) {
      ASSERT_EQ(sink->messages().size(), 1u);
      ASSERT_TRUE(sink->AllFlushed());
    }
    TakeAll();
  }
}

}  // namespace
}  // namespace gradsync::daemon
