#include "daemon/peer/node_exchange.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/loopback_engine.h"

namespace gradsync::daemon {
namespace {

struct Result {
  absl::Status status;
  GradientStats stats;
};

NodeWork WorkOn(std::vector<std::vector<float>>* ranks, double scale,
                std::promise<Result>* result) {
  NodeWork work;
  work.dtype = DataType::kFloat32;
  work.count = ranks->empty() ? 1000 : ranks->front().size();
  work.scale = scale;
  work.measure = true;
  for (auto& rank : *ranks) work.buffers.push_back(reinterpret_cast<std::byte*>(rank.data()));
  work.done = [result](const absl::Status& status, const GradientStats& stats) {
    result->set_value({status, stats});
  };
  return work;
}

NodeExchange::Connect Loopback() {
  return []() -> absl::StatusOr<std::unique_ptr<Engine>> {
    return std::make_unique<LoopbackEngine>();
  };
}

TEST(NodeExchangeTest, AveragesTheLocalRanks) {
  NodeExchange exchange("beta", Loopback(), [](const absl::Status&) { FAIL(); });
  // Several chunks. Some launches come before the engine is connected.
  std::vector<std::vector<float>> ranks = {std::vector<float>(300'001, 1.0f),
                                           std::vector<float>(300'001, 3.0f)};
  for (int step = 0; step < 3; ++step) {
    std::promise<Result> result;
    ASSERT_TRUE(exchange.Submit(WorkOn(&ranks, 0.5, &result)).ok());
    const Result got = result.get_future().get();
    EXPECT_TRUE(got.status.ok());
    EXPECT_NEAR(got.stats.sum_of_squares, 4.0 * 300'001, 1);
    for (const auto& rank : ranks) {
      EXPECT_EQ(rank.front(), 2.0f);
      EXPECT_EQ(rank.back(), 2.0f);
    }
  }
}

// An engine that notes how many buffers an exchange has, and finishes it.
class BufferCounter final : public Engine {
 public:
  explicit BufferCounter(std::promise<std::size_t>* counted) : counted_(counted) {}
  void Submit(Exchange* exchange) override {
    counted_->set_value(exchange->buffers);
    engine_.Submit(exchange);
  }
  void Broadcast(std::vector<std::byte*>, std::size_t, std::uint32_t,
                 std::function<void(const absl::Status&)>) override {}
  void Abort(const absl::Status& why) override { engine_.Abort(why); }
  EngineStatistics Statistics() const override { return engine_.Statistics(); }

 private:
  std::promise<std::size_t>* const counted_;
  LoopbackEngine engine_;
};

TEST(NodeExchangeTest, SaysWhatAnExchangeCosts) {
  std::promise<std::size_t> counted;
  NodeExchange exchange(
      "beta",
      [&]() -> absl::StatusOr<std::unique_ptr<Engine>> {
        return std::make_unique<BufferCounter>(&counted);
      },
      [](const absl::Status&) { FAIL(); });
  std::vector<std::vector<float>> ranks(3, std::vector<float>(10));
  std::promise<Result> result;
  ASSERT_TRUE(exchange.Submit(WorkOn(&ranks, 1, &result)).ok());
  EXPECT_EQ(counted.get_future().get(), 3u);
  EXPECT_TRUE(result.get_future().get().status.ok());
}

TEST(NodeExchangeTest, NodeWithoutRanksTakesPart) {
  NodeExchange exchange("beta", Loopback(), [](const absl::Status&) { FAIL(); });
  std::vector<std::vector<float>> none;
  std::promise<Result> result;
  ASSERT_TRUE(exchange.Submit(WorkOn(&none, 1, &result)).ok());
  const Result got = result.get_future().get();
  EXPECT_TRUE(got.status.ok());
  EXPECT_EQ(got.stats.sum_of_squares, 0);
}

TEST(NodeExchangeTest, BroadcastReachesEveryLocalRank) {
  NodeExchange exchange("beta", Loopback(), [](const absl::Status&) { FAIL(); });
  std::vector<std::vector<float>> ranks = {{1, 2, 3}, {0, 0, 0}, {0, 0, 0}};
  std::promise<Result> result;
  NodeWork work = WorkOn(&ranks, 1, &result);
  work.root_node = 0;
  work.count = 3 * sizeof(float);
  ASSERT_TRUE(exchange.Submit(std::move(work)).ok());
  EXPECT_TRUE(result.get_future().get().status.ok());
  EXPECT_EQ(ranks[2], ranks[0]);
}

TEST(NodeExchangeTest, FailedConnectFailsWaitingWork) {
  std::promise<void> go;
  std::promise<absl::Status> failed;
  NodeExchange exchange(
      "beta",
      [waits = go.get_future().share()]() -> absl::StatusOr<std::unique_ptr<Engine>> {
        waits.wait();
        return absl::UnavailableError("no way");
      },
      [&](const absl::Status& why) { failed.set_value(why); });
  std::vector<std::vector<float>> ranks = {{1, 2, 3}};
  std::promise<Result> result;
  ASSERT_TRUE(exchange.Submit(WorkOn(&ranks, 0.5, &result)).ok());
  go.set_value();
  EXPECT_EQ(result.get_future().get().status.message(), "no way");
  EXPECT_EQ(failed.get_future().get().message(), "no way");
  EXPECT_EQ(exchange.failure().message(), "no way");
  EXPECT_EQ(ranks[0][0], 1.0f);
  std::promise<Result> never;
  EXPECT_FALSE(exchange.Submit(WorkOn(&ranks, 0.5, &never)).ok());
}

TEST(NodeExchangeTest, AbortWhileConnectingFailsWaitingWork) {
  std::promise<void> go;
  auto exchange = std::make_unique<NodeExchange>(
      "beta",
      [waits = go.get_future().share()]() -> absl::StatusOr<std::unique_ptr<Engine>> {
        waits.wait();
        return std::make_unique<LoopbackEngine>();
      },
      [](const absl::Status&) { FAIL(); });
  std::vector<std::vector<float>> ranks = {{1, 2, 3}};
  std::promise<Result> result;
  ASSERT_TRUE(exchange->Submit(WorkOn(&ranks, 0.5, &result)).ok());
  exchange->Abort(absl::UnavailableError("a node is lost"));
  EXPECT_EQ(result.get_future().get().status.message(), "a node is lost");
  go.set_value();
  exchange.reset();
}

}  // namespace
}  // namespace gradsync::daemon
