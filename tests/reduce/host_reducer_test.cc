#include "daemon/reduce/host_reducer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/reduce/combine.h"
#include "daemon/reduce/user_shares.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Lets a thread wait until Down() has been called `count` times.
class Countdown {
 public:
  explicit Countdown(int count) : left_(count) {}
  void Down() {
    // Notifies under the lock: the waiter may destroy this object as soon as it gets the lock.
    MutexLock lock(&mutex_);
    --left_;
    zero_.NotifyAll();
  }
  void Wait() {
    MutexLock lock(&mutex_);
    while (left_ > 0) zero_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar zero_;
  int left_ ABSL_GUARDED_BY(mutex_);
};

// An operation with its memory. Element i of buffer r is r + 1 + i % 8.
class Bucket {
 public:
  Bucket(std::size_t bytes, std::size_t ranks, std::uint64_t flow = 0, std::uint32_t user = 0) {
    operation_.dtype = DataType::kFloat32;
    operation_.count = bytes / sizeof(float);
    operation_.scale = 1.0 / static_cast<double>(ranks);
    operation_.flow = flow;
    operation_.user = Tenant(user);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      memory_.push_back(std::make_unique<std::vector<float>>(operation_.count));
      operation_.host().buffers.push_back(reinterpret_cast<std::byte*>(memory_.back()->data()));
    }
    Fill();
  }

  void Fill() {
    for (std::size_t rank = 0; rank < memory_.size(); ++rank) {
      for (std::size_t i = 0; i < operation_.count; ++i) {
        (*memory_[rank])[i] = static_cast<float>(rank + 1 + i % 8);
      }
    }
  }

  // True if every buffer holds the average of what Fill() wrote.
  bool Averaged() const {
    float expected[8];
    for (std::size_t i = 0; i < 8; ++i) {
      float sum = 0;
      for (std::size_t rank = 0; rank < memory_.size(); ++rank) {
        sum += static_cast<float>(rank + 1 + i);
      }
      expected[i] = sum * static_cast<float>(operation_.scale);
    }
    for (const auto& buffer : memory_) {
      for (std::size_t i = 0; i < operation_.count; ++i) {
        if ((*buffer)[i] != expected[i % 8]) return false;
      }
    }
    return true;
  }

  ReduceOperation* operation() { return &operation_; }

 private:
  ReduceOperation operation_;
  std::vector<std::unique_ptr<std::vector<float>>> memory_;
};

// Too large to run on the submitter's thread, and small enough for one slice.
constexpr std::size_t kOneSlice = kMiB / 2;

// Occupies a reducer's only thread from Occupy() to Release().
class Plug {
 public:
  Plug() : bucket_(kOneSlice, 2, /*flow=*/999), occupied_(1), released_(1) {
    bucket_.operation()->done = [this](const ReduceTimes&) {
      occupied_.Down();
      released_.Wait();
    };
  }
  void Occupy(HostReducer* reducer) {
    reducer->Reduce(bucket_.operation());
    occupied_.Wait();
  }
  void Release() { released_.Down(); }

 private:
  Bucket bucket_;
  Countdown occupied_;
  Countdown released_;
};

// The last bits of the statistics depend on the slices, so those must be the same.
TEST(HostReducerTest, AResultIsMeasuredAgainBitForBit) {
  for (const int threads : {1, 3}) {
    HostReducer reducer(threads);
    for (const std::size_t ranks : {2, 3, 5}) {
      for (const std::size_t bytes : {std::size_t{4096}, kMiB - 4, 9 * kMiB + 100}) {
        Bucket bucket(bytes, ranks);
        ReduceOperation& reduction = *bucket.operation();
        // Squares that do not add up without rounding.
        auto* const values = reinterpret_cast<float*>(reduction.host().buffers[0]);
        for (std::size_t i = 0; i < reduction.count; ++i) {
          values[i] = 1.0f / static_cast<float>(i % 1013 + 3);
        }
        reduction.measure = true;
        ReduceOperation check;
        check.dtype = reduction.dtype;
        check.count = reduction.count;
        check.measure = true;
        check.SetBuffers({reduction.host().buffers[1]});
        check.host().measured_of = ranks;
        for (ReduceOperation* operation : {&reduction, &check}) {
          Countdown done(1);
          operation->done = [&](const ReduceTimes&) { done.Down(); };
          reducer.Reduce(operation);
          done.Wait();
        }
        EXPECT_EQ(check.stats.sum_of_squares, reduction.stats.sum_of_squares)
            << bytes << " bytes, " << ranks << " ranks, " << threads << " threads";
      }
    }
  }
}

TEST(HostReducerTest, AveragesForEverySizeAndNumberOfThreads) {
  for (const int threads : {1, 2, 3, 4}) {
    HostReducer reducer(threads);
    EXPECT_EQ(reducer.threads(), threads);
    for (const std::size_t ranks : {1, 2, 3, 5}) {
      for (const std::size_t bytes :
           {std::size_t{4}, std::size_t{4096}, kMiB - 4, kMiB, 2 * kMiB + 4, 9 * kMiB + 100}) {
        Bucket bucket(bytes, ranks);
        Countdown done(1);
        ReduceTimes times;
        bucket.operation()->done = [&](const ReduceTimes& t) {
          times = t;
          done.Down();
        };
        reducer.Reduce(bucket.operation());
        done.Wait();
        EXPECT_TRUE(bucket.Averaged()) << bytes << " bytes, " << ranks << " ranks, " << threads;
        EXPECT_GT(times.start_ns, 0u);
        EXPECT_GE(times.finish_ns, times.start_ns);
      }
    }
  }
}

TEST(HostReducerTest, NumberOfThreadsDoesNotChangeABit) {
  constexpr std::size_t kCount = 3 * kMiB / 2 + 37;  // bfloat16, 3 MiB
  std::vector<std::vector<std::uint16_t>> input(3, std::vector<std::uint16_t>(kCount));
  std::uint32_t random = 1;
  for (auto& buffer : input) {
    for (std::uint16_t& element : buffer) {
      random = random * 1664525 + 1013904223;
      element = static_cast<std::uint16_t>(random >> 16) & 0xBFFF;  // finite
    }
  }
  const auto pointers = [](std::vector<std::vector<std::uint16_t>>* buffers) {
    absl::InlinedVector<std::byte*, 8> result;
    for (auto& buffer : *buffers) result.push_back(reinterpret_cast<std::byte*>(buffer.data()));
    return result;
  };
  std::vector<std::vector<std::uint16_t>> whole = input;
  Combine(DataType::kBfloat16, pointers(&whole), kCount, 1.0 / 3);
  for (const int threads : {1, 2, 3, 7}) {
    std::vector<std::vector<std::uint16_t>> buffers = input;
    HostReducer reducer(threads);
    ReduceOperation operation;
    operation.dtype = DataType::kBfloat16;
    operation.count = kCount;
    operation.scale = 1.0 / 3;
    operation.host().buffers = pointers(&buffers);
    Countdown done(1);
    operation.done = [&](const ReduceTimes&) { done.Down(); };
    reducer.Reduce(&operation);
    done.Wait();
    EXPECT_TRUE(buffers == whole) << threads << " threads";
  }
}

TEST(HostReducerTest, SlicesMaximaOfIntegers) {
  constexpr std::size_t kCount = 5 * kMiB + 37;  // several slices, and an odd end
  for (const int threads : {1, 3}) {
    std::vector<std::vector<std::uint8_t>> buffers(2, std::vector<std::uint8_t>(kCount));
    for (std::size_t i = 0; i < kCount; ++i) buffers[i % 2][i] = static_cast<std::uint8_t>(i);
    HostReducer reducer(threads);
    ReduceOperation operation;
    operation.dtype = DataType::kUint8;
    operation.op = ReduceOp::kMax;
    operation.count = kCount;
    for (auto& buffer : buffers) {
      operation.host().buffers.push_back(reinterpret_cast<std::byte*>(buffer.data()));
    }
    Countdown done(1);
    operation.done = [&](const ReduceTimes&) { done.Down(); };
    reducer.Reduce(&operation);
    done.Wait();
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(buffers[0][i], static_cast<std::uint8_t>(i)) << i << ", " << threads << " threads";
    }
    EXPECT_TRUE(buffers[0] == buffers[1]);
  }
}

// The stats do not depend on the thread that finishes first.
TEST(HostReducerTest, SameSlicesGiveTheSameStats) {
  constexpr std::size_t kCount = 5 * kMiB / 2 + 37;
  std::vector<float> input(kCount);
  std::uint32_t random = 1;
  for (float& element : input) {
    random = random * 1664525 + 1013904223;
    element = static_cast<float>(random) * 1e-9f - 2.0f;
  }
  HostReducer reducer(3);
  double first = 0;
  for (int run = 0; run < 10; ++run) {
    std::vector<float> buffers[2] = {input, input};
    ReduceOperation operation;
    operation.dtype = DataType::kFloat32;
    operation.count = kCount;
    operation.scale = 0.3;
    operation.measure = true;
    for (auto& buffer : buffers) {
      operation.host().buffers.push_back(reinterpret_cast<std::byte*>(buffer.data()));
    }
    Countdown done(1);
    operation.done = [&](const ReduceTimes&) { done.Down(); };
    reducer.Reduce(&operation);
    done.Wait();
    if (run == 0) first = operation.stats.sum_of_squares;
    EXPECT_GT(first, 0);
    EXPECT_EQ(operation.stats.sum_of_squares, first);
  }
}

// Operations that run inline, in one slice and in several. With one rank there is nothing to
// combine.
TEST(HostReducerTest, MeasuresTheResultInTheOrderOfTheSlices) {
  for (const int threads : {1, 3}) {
    HostReducer reducer(threads);
    for (const std::size_t ranks : {1, 2, 3}) {
      for (const std::size_t bytes :
           {std::size_t{0}, std::size_t{4096}, kMiB / 2, 9 * kMiB + 100}) {
        Bucket bucket(bytes, ranks);
        const std::size_t count = bucket.operation()->count;
        // Small multiples of 1/4, so that float32's sums are exact.
        double expected = 0;
        for (std::size_t i = 0; i < count; ++i) {
          const double average =
              static_cast<double>(1 + i % 8) + (static_cast<double>(ranks) - 1) / 2;
          expected += average * average;
        }
        if (ranks == 3) bucket.operation()->scale = 0.25;
        if (ranks == 3) expected *= 0.5625;
        bucket.operation()->measure = true;
        for (int step = 0; step < 2; ++step) {
          bucket.Fill();
          Countdown done(1);
          bucket.operation()->done = [&](const ReduceTimes&) { done.Down(); };
          reducer.Reduce(bucket.operation());
          done.Wait();
          const GradientStats& stats = bucket.operation()->stats;
          EXPECT_EQ(stats.sum_of_squares, expected) << bytes << " bytes, " << ranks << " ranks";
          EXPECT_EQ(stats.non_finite, 0u);
        }
      }
    }
  }
}

TEST(HostReducerTest, SmallAndEmptyOperationsEndBeforeReduceReturns) {
  HostReducer reducer(2);
  // 2 ranks: each byte is read and written twice.
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{4}, HostReducer::kInlineTrafficBytes / 4}) {
    Bucket bucket(bytes, 2);
    std::thread::id thread;
    bucket.operation()->done = [&](const ReduceTimes&) { thread = std::this_thread::get_id(); };
    reducer.Reduce(bucket.operation());
    EXPECT_EQ(thread, std::this_thread::get_id()) << bytes;
    EXPECT_TRUE(bucket.Averaged()) << bytes;
  }
  ReduceOperation nothing;
  bool done = false;
  nothing.done = [&](const ReduceTimes&) { done = true; };
  reducer.Reduce(&nothing);
  EXPECT_TRUE(done);
}

TEST(HostReducerTest, SmallOperationsDoNotWaitForBusyThreads) {
  HostReducer reducer(1);
  Plug plug;
  plug.Occupy(&reducer);
  Bucket bucket(4096, 2);
  bool done = false;
  bucket.operation()->done = [&](const ReduceTimes&) { done = true; };
  reducer.Reduce(bucket.operation());
  EXPECT_TRUE(done);
  plug.Release();
}

// Records the names of operations in the order of their done(). The reducer has one thread, which
// is blocked until all operations are submitted. Slices take no time unless the test says so.
class Order {
 public:
  Order() : reducer_(std::make_unique<HostReducer>(1, &clock_)) { plug_.Occupy(reducer_.get()); }

  void Submit(const std::string& name, std::size_t bytes, std::uint64_t flow,
              std::uint32_t user = 0, std::uint64_t takes_ns = 0) {
    buckets_.push_back(std::make_unique<Bucket>(bytes, 2, flow, user));
    buckets_.back()->operation()->done = [this, name, takes_ns](const ReduceTimes&) {
      order_.push_back(name);
      clock_.Advance(takes_ns);
    };
    reducer_->Reduce(buckets_.back()->operation());
  }

  std::vector<std::string> Finish() {
    plug_.Release();
    reducer_.reset();  // drains
    return order_;
  }

 private:
  ManualClock clock_;
  Plug plug_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<std::string> order_;  // written by the one reduce thread, read after it has ended
  std::unique_ptr<HostReducer> reducer_;
};

TEST(HostReducerTest, OneFlowIsServedInTheOrderOfSubmission) {
  Order order;
  std::vector<std::string> names;
  for (int i = 0; i < 40; ++i) {  // more than the ring's first capacity
    names.push_back("a" + std::to_string(i));
    order.Submit(names.back(), kOneSlice, 1);
  }
  EXPECT_EQ(order.Finish(), names);
}

TEST(HostReducerTest, FlowsTakeTurns) {
  Order order;
  for (int i = 1; i <= 4; ++i) order.Submit("a" + std::to_string(i), kOneSlice, 1);
  order.Submit("b1", kOneSlice, 2);
  order.Submit("b2", kOneSlice, 2);
  order.Submit("c1", kOneSlice, 3);
  EXPECT_EQ(order.Finish(), (std::vector<std::string>{"a1", "b1", "c1", "a2", "b2", "a3", "a4"}));
}

TEST(HostReducerTest, LargeOperationYieldsToOtherFlowsBetweenSlices) {
  Order order;
  order.Submit("large", 3 * HostReducer::kMaxSliceTraffic / 4, 1);
  order.Submit("small", kOneSlice, 2);
  EXPECT_EQ(order.Finish(), (std::vector<std::string>{"small", "large"}));
}

TEST(HostReducerTest, UsersTakeTurnsHoweverManyFlowsTheyHave) {
  Order order;
  for (int i = 1; i <= 3; ++i) order.Submit("a" + std::to_string(i), kOneSlice, i, /*user=*/1);
  for (int i = 1; i <= 3; ++i) order.Submit("b" + std::to_string(i), kOneSlice, 9, /*user=*/2);
  EXPECT_EQ(order.Finish(), (std::vector<std::string>{"a1", "b1", "a2", "b2", "a3", "b3"}));
}

TEST(HostReducerTest, TurnsAreCountedInBytes) {
  Order order;
  // Twice kOneSlice is one slice too.
  for (int i = 1; i <= 2; ++i) order.Submit("A" + std::to_string(i), 2 * kOneSlice, 1, /*user=*/1);
  for (int i = 1; i <= 4; ++i) order.Submit("b" + std::to_string(i), kOneSlice, 2, /*user=*/2);
  EXPECT_EQ(order.Finish(), (std::vector<std::string>{"A1", "b1", "b2", "A2", "b3", "b4"}));
}

TEST(HostReducerTest, SlowSlicesCountForTheirTime) {
  constexpr std::uint64_t kSlowNs = 1'000'000'000;
  Order order;
  for (int i = 1; i <= 2; ++i) {
    order.Submit("a" + std::to_string(i), kOneSlice, 1, /*user=*/1, kSlowNs);
  }
  std::vector<std::string> expected = {"a1"};
  for (std::uint64_t i = 1; i <= UserShares::kMostTimes + 1; ++i) {
    order.Submit("b" + std::to_string(i), kOneSlice, 2, /*user=*/2);
    expected.push_back("b" + std::to_string(i));
  }
  expected.insert(expected.end() - 1, "a2");
  EXPECT_EQ(order.Finish(), expected);
}

// The same between the jobs of a user.
TEST(HostReducerTest, SlowSlicesCountForTheirFlow) {
  Order order;
  // Twice as long as 13 bytes in a nanosecond would take, with what it costs to tell two ranks.
  constexpr std::uint64_t kBytes = 4 * kOneSlice + 3 * (64 << 10);
  order.Submit("a1", kOneSlice, 1, /*user=*/1, 2 * kBytes / 13 + 1);
  order.Submit("a2", kOneSlice, 1, /*user=*/1);
  for (int i = 1; i <= 3; ++i) order.Submit("b" + std::to_string(i), kOneSlice, 2, /*user=*/1);
  EXPECT_EQ(order.Finish(), (std::vector<std::string>{"a1", "b1", "b2", "b3", "a2"}));
}

TEST(HostReducerTest, ManySmallOperationsOfOneMessageDoNotHoldTheSubmitter) {
  HostReducer reducer(1);
  Plug plug;
  plug.Occupy(&reducer);
  constexpr std::size_t kOperations = 20;
  std::vector<std::unique_ptr<Bucket>> buckets;
  std::vector<ReduceOperation*> operations;
  const std::thread::id submitter = std::this_thread::get_id();
  std::atomic<std::size_t> here{0};
  Countdown all(kOperations);
  for (std::size_t i = 0; i < kOperations; ++i) {
    // Four of them have as much traffic as may run inline.
    buckets.push_back(std::make_unique<Bucket>(HostReducer::kInlineTrafficBytes / 16, 2));
    operations.push_back(buckets.back()->operation());
    operations.back()->done = [&](const ReduceTimes&) {
      if (std::this_thread::get_id() == submitter) ++here;
      all.Down();
    };
  }
  reducer.ReduceAll(operations);
  EXPECT_EQ(here, 4u);
  plug.Release();
  all.Wait();
  for (const auto& bucket : buckets) EXPECT_TRUE(bucket->Averaged());
}

// A flow that submits its next operation when one is done gets only one turn in each round,
// whatever its place in the round.
TEST(HostReducerTest, ReturningFlowWaitsForItsTurn) {
  const ManualClock clock;  // slices take no time
  HostReducer reducer(1, &clock);
  Plug plug;
  plug.Occupy(&reducer);
  std::string order;
  Countdown all(12);
  std::vector<std::unique_ptr<Bucket>> buckets;
  const auto make = [&](char name) {
    buckets.push_back(std::make_unique<Bucket>(kOneSlice, 2, static_cast<std::uint64_t>(name)));
    ReduceOperation* const operation = buckets.back()->operation();
    operation->done = [&, name](const ReduceTimes&) {
      order += name;
      all.Down();
    };
    return operation;
  };
  ReduceOperation* const returning = make('b');
  int submissions = 1;
  returning->done = [&](const ReduceTimes&) {
    order += 'b';
    if (submissions++ < 4) reducer.Reduce(returning);
    all.Down();
  };
  for (int i = 0; i < 4; ++i) {
    reducer.Reduce(make('a'));
    if (i == 0) reducer.Reduce(returning);
    reducer.Reduce(make('c'));
  }
  plug.Release();
  all.Wait();
  // b leaves the round when its operation is done, and comes back at the round's end.
  EXPECT_EQ(order, "abcacbacbacb");
}

TEST(HostReducerTest, DestructorFinishesSubmittedOperations) {
  std::vector<std::unique_ptr<Bucket>> buckets;
  std::atomic<int> done{0};
  {
    HostReducer reducer(2);
    for (int i = 0; i < 20; ++i) {
      buckets.push_back(std::make_unique<Bucket>(3 * kMiB, 2, /*flow=*/i % 3));
      buckets.back()->operation()->done = [&](const ReduceTimes&) { ++done; };
      reducer.Reduce(buckets.back()->operation());
    }
  }
  EXPECT_EQ(done, 20);
  for (const auto& bucket : buckets) EXPECT_TRUE(bucket->Averaged());
}

TEST(HostReducerTest, DestructorFinishesOperationsThatDoneSubmits) {
  Bucket bucket(2 * kMiB, 2);
  std::atomic<int> done{0};
  {
    HostReducer reducer(2);
    bucket.operation()->done = [&](const ReduceTimes&) {
      if (++done < 10) reducer.Reduce(bucket.operation());
    };
    reducer.Reduce(bucket.operation());
  }
  EXPECT_EQ(done, 10);
}

// Several threads submit at once. Each submits its next step when the last one is done.
TEST(HostReducerTest, ManyFlowsCallDoneOncePerSubmission) {
  constexpr int kFlows = 6;
  constexpr int kSteps = 25;
  HostReducer reducer(3);
  std::vector<std::thread> submitters;
  std::vector<std::atomic<int>> done(kFlows);
  std::atomic<int> wrong{0};
  for (int flow = 0; flow < kFlows; ++flow) {
    submitters.emplace_back([&, flow] {
      // 16 KiB (inline), 512 KiB, 2 MiB and 3 MiB.
      std::vector<std::unique_ptr<Bucket>> buckets;
      for (const std::size_t bytes : {kMiB / 64, kMiB / 2, 2 * kMiB, 3 * kMiB}) {
        buckets.push_back(std::make_unique<Bucket>(bytes, 2, flow));
      }
      for (int step = 0; step < kSteps; ++step) {
        Countdown all(static_cast<int>(buckets.size()));
        for (auto& bucket : buckets) {
          bucket->Fill();
          bucket->operation()->done = [&](const ReduceTimes&) {
            ++done[flow];
            all.Down();
          };
          reducer.Reduce(bucket->operation());
        }
        all.Wait();
        for (auto& bucket : buckets) wrong += bucket->Averaged() ? 0 : 1;
      }
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  for (int flow = 0; flow < kFlows; ++flow) EXPECT_EQ(done[flow], 4 * kSteps);
  EXPECT_EQ(wrong, 0);
}

TEST(HostReducerTest, DefaultThreadsLeaveMostCpusToTheTrainers) {
  EXPECT_GE(HostReducer::DefaultThreads(), 1);
  EXPECT_LE(HostReducer::DefaultThreads(), 4);
}

TEST(HostReducerTest, NoThreadsCountAsOne) { EXPECT_EQ(HostReducer(0).threads(), 1); }

}  // namespace
}  // namespace gradsync::daemon
