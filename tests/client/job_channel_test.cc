// Barrier, Broadcast and AllReduce, against a real daemon.

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

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

}  // namespace
}  // namespace gradsync
