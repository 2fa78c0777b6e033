// The contract of engine.h, for every engine. A test instantiates the suite with its kinds.

#ifndef TESTS_ENGINE_ENGINE_CONTRACT_H_
#define TESTS_ENGINE_ENGINE_CONTRACT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/wire_format.h"
#include "tests/engine/engine_bucket.h"

namespace gradsync::daemon {

inline constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16,
                                      DataType::kBfloat16};

struct Kind {
  std::string name;
  std::uint32_t nodes;  // 1 for the loopback engine
  int lanes;
  std::size_t chunk_bytes;
  WireType wire = WireType::kSame;
  bool tls = false;
};

// Connected engines, one per node. Each test that instantiates the suite defines it.
std::vector<std::unique_ptr<Engine>> Engines(const Kind& kind);

class EngineContract : public testing::TestWithParam<Kind> {
 protected:
  EngineContract() : nodes_(GetParam().nodes), engines_(Engines(GetParam())) {}

  DataType Wire(DataType dtype) const {
    return nodes_ == 1 ? WorkType(dtype) : WireDataType(dtype, GetParam().wire);
  }

  // Makes one bucket per node.
  std::vector<std::unique_ptr<EngineBucket>> Buckets(DataType dtype, std::size_t count) const {
    std::vector<std::unique_ptr<EngineBucket>> buckets;
    for (std::uint32_t node = 0; node < nodes_; ++node) {
      buckets.push_back(std::make_unique<EngineBucket>(dtype, count, node));
    }
    return buckets;
  }

  void Submit(const std::vector<std::unique_ptr<EngineBucket>>& buckets) {
    for (std::uint32_t node = 0; node < nodes_; ++node) {
      engines_[node]->Submit(buckets[node]->exchange());
    }
  }

  void ExpectSums(const std::vector<std::unique_ptr<EngineBucket>>& buckets, DataType dtype,
                  std::size_t count) {
    for (std::uint32_t node = 0; node < nodes_; ++node) {
      const auto status = buckets[node]->Wait();
      ASSERT_TRUE(status.has_value());
      ASSERT_TRUE(status->ok()) << *status;
      ASSERT_EQ(buckets[node]->Unwritten(), 0u);
      ASSERT_EQ(buckets[node]->result(), buckets[0]->result()) << "node " << node;
    }
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_EQ(buckets[0]->ResultAt(i), ExpectedSum(dtype, Wire(dtype), nodes_, i))
          << DataTypeName(dtype) << " " << count << ": " << i;
    }
  }

  const std::uint32_t nodes_;
  const std::vector<std::unique_ptr<Engine>> engines_;
};

TEST_P(EngineContract, SumsInTheOrderOfTheNodesBitByBit) {
  for (const DataType dtype : kTypes) {
    for (const std::size_t count : {1, 2, 3, 63, 64, 65, 129, 1000, 16384, 100003}) {
      const auto buckets = Buckets(dtype, count);
      Submit(buckets);
      ExpectSums(buckets, dtype, count);
    }
  }
}

TEST_P(EngineContract, EmptyBucketIsDoneAndTouchesNothing) {
  const auto buckets = Buckets(DataType::kFloat32, 0);
  Submit(buckets);
  for (const auto& bucket : buckets) {
    const auto status = bucket->Wait();
    ASSERT_TRUE(status.has_value());
    EXPECT_TRUE(status->ok()) << *status;
  }
}

TEST_P(EngineContract, RunsManyExchangesOverSeveralSteps) {
  constexpr std::size_t kBuckets = 40;
  std::vector<std::vector<std::unique_ptr<EngineBucket>>> all;
  const auto count = [](std::size_t b) { return (b * 977) % 20000; };
  for (std::size_t b = 0; b < kBuckets; ++b) all.push_back(Buckets(kTypes[b % 4], count(b)));
  for (int step = 0; step < 3; ++step) {
    for (const auto& buckets : all) {
      for (const auto& bucket : buckets) bucket->Reset();
    }
    // Nodes may be at different steps.
    std::vector<std::thread> submitters;
    for (std::uint32_t node = 0; node < nodes_; ++node) {
      submitters.emplace_back([&, node] {
        for (const auto& buckets : all) engines_[node]->Submit(buckets[node]->exchange());
      });
    }
    for (std::thread& submitter : submitters) submitter.join();
    for (std::size_t b = 0; b < kBuckets; ++b) ExpectSums(all[b], kTypes[b % 4], count(b));
  }
}

TEST_P(EngineContract, DoneMaySubmitTheNextStep) {
  std::vector<std::unique_ptr<Event>> finished;
  const auto buckets = Buckets(DataType::kFloat32, 5000);
  std::vector<int> steps(nodes_);
  for (std::uint32_t node = 0; node < nodes_; ++node) {
    finished.push_back(std::make_unique<Event>());
    buckets[node]->exchange()->done = [&, node](const absl::Status& status) {
      if (!status.ok() || ++steps[node] == 50) return finished[node]->Set(status);
      engines_[node]->Submit(buckets[node]->exchange());
    };
  }
  Submit(buckets);
  for (const auto& event : finished) {
    const auto status = event->Wait();
    ASSERT_TRUE(status.has_value());
    EXPECT_TRUE(status->ok()) << *status;
  }
}

TEST_P(EngineContract, BroadcastsFromEveryNodeInOrderWithExchanges) {
  for (std::uint32_t root = 0; root < nodes_; ++root) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 1000, 300'001}) {
      std::vector<std::vector<std::byte>> data(nodes_, std::vector<std::byte>(bytes));
      std::vector<std::vector<std::byte>> others = data;  // of a second rank on each node
      for (std::size_t i = 0; i < bytes; ++i) data[root][i] = static_cast<std::byte>(i * 7 + root);
      const std::vector<std::byte> expected = data[root];
      const auto before = Buckets(DataType::kFloat32, 777);
      const auto after = Buckets(DataType::kBfloat16, 12345);
      std::vector<Event> done(nodes_);
      Submit(before);
      for (std::uint32_t node = 0; node < nodes_; ++node) {
        engines_[node]->Broadcast(
            {data[node].data(), others[node].data()}, bytes, root,
            [&, node](const absl::Status& status) { done[node].Set(status); });
      }
      Submit(after);
      for (std::uint32_t node = 0; node < nodes_; ++node) {
        const auto status = done[node].Wait();
        ASSERT_TRUE(status.has_value());
        ASSERT_TRUE(status->ok()) << *status;
        ASSERT_EQ(data[node], expected) << "node " << node << " of root " << root;
        ASSERT_EQ(others[node], expected) << "node " << node << " of root " << root;
      }
      ExpectSums(before, DataType::kFloat32, 777);
      ExpectSums(after, DataType::kBfloat16, 12345);
    }
  }
}

TEST_P(EngineContract, AbortFailsPendingAndLaterExchangesOnEveryNode) {
  const absl::Status why = MakeError(absl::StatusCode::kAborted, reason::kRankLost,
                                     "rank 3 is lost", {{field::kNode, "b"}});
  std::vector<std::unique_ptr<EngineBucket>> buckets;
  // Node 0 stays in its gather callback, so no other node can finish.
  Event entered, go_on;
  for (int b = 0; b < 3; ++b) {
    for (auto& bucket : Buckets(DataType::kFloat32, 300'000)) buckets.push_back(std::move(bucket));
  }
  for (std::size_t b = 0; b < buckets.size(); b += nodes_) {
    buckets[b]->exchange()->gather = [&](std::size_t, std::size_t, std::byte*) {
      entered.Set();
      go_on.Wait();
    };
  }
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    engines_[b % nodes_]->Submit(buckets[b]->exchange());
  }
  ASSERT_TRUE(entered.Wait().has_value());
  engines_[nodes_ - 1]->Abort(why);
  engines_[nodes_ - 1]->Abort(absl::InternalError("the second abort"));
  go_on.Set();
  for (const auto& bucket : buckets) {
    const auto status = bucket->Wait();
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->code(), why.code());
    EXPECT_EQ(status->message(), why.message());
    EXPECT_EQ(DetailsOf(*status).reason, "RANK_LOST");
  }
  const auto late = Buckets(DataType::kFloat32, 10);
  Submit(late);
  for (const auto& bucket : late) {
    const auto status = bucket->Wait();
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->message(), why.message());
    EXPECT_EQ(bucket->Unwritten(), 10u);
  }
  std::vector<std::byte> data(100);
  Event broadcast;
  engines_[0]->Broadcast({data.data()}, data.size(), 0,
                         [&](const absl::Status& status) { broadcast.Set(status); });
  const auto status = broadcast.Wait();
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->message(), why.message());
}

TEST_P(EngineContract, CountsExchangesAndChunks) {
  const auto buckets = Buckets(DataType::kFloat32, 1000);
  Submit(buckets);
  ExpectSums(buckets, DataType::kFloat32, 1000);
  for (const auto& engine : engines_) {
    const EngineStatistics statistics = engine->Statistics();
    EXPECT_EQ(statistics.exchanges, 1u);
    std::uint64_t chunks = 0, sent = 0, received = 0;
    for (const LaneStatistics& lane : statistics.lanes) {
      chunks += lane.chunks;
      sent += lane.bytes_sent;
      received += lane.bytes_received;
    }
    EXPECT_EQ(chunks, 1u);
    if (nodes_ == 1) continue;
    // On 2 nodes the traffic is about one bucket each way; on 3 nodes, one shard more.
    const std::size_t item = ItemSize(Wire(DataType::kFloat32));
    EXPECT_GT(sent, item * 1000 / 2);
    EXPECT_LT(sent, item * 1000 * 2);
    EXPECT_GT(received, item * 1000 / 2);
    EXPECT_LT(received, item * 1000 * 2);
  }
}

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_ENGINE_CONTRACT_H_
