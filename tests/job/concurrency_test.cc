// A stress test with real threads at full speed. Trainers take steps, abandon them, are lost and
// join again. The reducer and the executor are real. Meanwhile a daemon thread ticks, ends sessions
// and reads the status. It checks what must hold for every interleaving, and gives ThreadSanitizer
// races to find.

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/base/fair_executor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_table.h"
#include "daemon/reduce/host_reducer.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/job/trainer_memory.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kRanks = 3;
constexpr std::uint64_t kStepsPerGeneration = 60;
constexpr std::uint64_t kStepsInAll = 600;  // complete ones
constexpr std::uint64_t kStepTimeoutNs = 1'000'000'000;
constexpr std::uint64_t kStagingBytes = 256;

// Elements of each bucket. The submitting thread reduces the small buckets itself; the large one
// goes to the reduce threads. With so many buckets, the executor ends void steps.
constexpr std::uint64_t kCounts[] = {5, 24 * 1024, 16, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr std::uint32_t kBuckets = 11;
// The third message marks all buckets but the first two.
constexpr std::uint32_t kMarks = 3;
static_assert(2 * kRanks * kCounts[1] * sizeof(float) > HostReducer::kInlineTrafficBytes);

LayoutSpec Spec() {
  LayoutSpec spec;
  spec.name = "model";
  for (const std::uint64_t count : kCounts) {
    spec.explicit_buckets.emplace_back(DataType::kFloat32, count);
  }
  return spec;
}

float Gradient(std::uint32_t rank, std::uint64_t step, std::uint32_t bucket, std::uint64_t i) {
  return static_cast<float>((rank + 1) * 7 + step % 11 + bucket * 3 + i % 5);
}

// A session's sink; another thread waits for its messages.
class WaitingSink final : public SessionSink {
 public:
  void Queue(SessionMessage message) override {
    MutexLock lock(&mutex_);
    EXPECT_FALSE(ended_) << "a message after the session's end";
    ended_ = ended_ || std::holds_alternative<SessionEndMessage>(message);
    queue_.push_back(std::move(message));
  }
  void Flush() override { changed_.NotifyAll(); }

  SessionMessage Next() {
    MutexLock lock(&mutex_);
    while (queue_.empty()) changed_.Wait(&mutex_);
    SessionMessage message = std::move(queue_.front());
    queue_.pop_front();
    return message;
  }
  bool Empty() {
    MutexLock lock(&mutex_);
    return queue_.empty();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<SessionMessage> queue_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

JobEnvironment Environment(const Clock* clock, Reducer* reducer, UserExecutor* executor) {
  JobEnvironment environment;
  environment.clock = clock;
  environment.reducer = reducer;
  environment.executor = executor;
  return environment;
}

// State that all threads share.
struct World {
  ManualClock clock;
  HostReducer reducer{2};
  FairExecutor executor{/*threads=*/1};
  JobTable table{Environment(&clock, &reducer, &executor), 1};
  std::atomic<std::uint64_t> incarnations{0};
  std::atomic<std::uint64_t> complete{0};  // steps, counted by rank 0
  std::atomic<std::uint64_t> voided{0};
  std::atomic<std::uint64_t> operations{0};
  std::atomic<std::uint64_t> lost{0};
  std::atomic<bool> stop{false};
};

class Trainer {
 public:
  Trainer(World* world, std::uint32_t rank) : world_(*world), rank_(rank), random_(rank + 1) {}

  // Runs one session after the other until the test stops it.
  void Run() {
    while (!world_.stop.load()) RunSession();
  }

 private:
  struct Window {
    alignas(64) std::byte bytes[kStagingBytes] = {};
  };

  bool Chance(int in) { return random_() % static_cast<unsigned>(in) == 0; }

  // Waits for the next message of this kind; nullopt if the session ends first.
  template <typename Message>
  std::optional<Message> Await() {
    for (;;) {
      SessionMessage message = sink_->Next();
      if (auto* found = std::get_if<Message>(&message)) return std::move(*found);
      if (auto* end = std::get_if<SessionEndMessage>(&message)) {
        End(end->status);
        return std::nullopt;
      }
      EXPECT_FALSE(std::holds_alternative<StepDoneMessage>(message));
      EXPECT_FALSE(std::holds_alternative<OperationFailedMessage>(message));
    }
  }

  void End(const absl::Status& status) {
    const std::string reason = DetailsOf(status).reason;
    if (reason == "RANK_LOST") ++world_.lost;
    EXPECT_TRUE(reason == "RANK_LOST" || reason == "SUPERSEDED" || reason == "STOPPED" ||
                reason == "DIED")
        << status;
    // From here only the trainer uses the memory: ThreadSanitizer reports a reduction that still
    // touches it.
    if (memory_ != nullptr) std::memset(memory_->data(), 0, memory_->bytes());
    if (window_ != nullptr) std::memset(window_->bytes, 0, kStagingBytes);
  }

  void RunSession() {
    sink_ = std::make_shared<WaitingSink>();
    memory_.reset();
    window_ = std::make_shared<Window>();
    session_ = {rank_, ++world_.incarnations};
    JobOptions options;
    options.step_timeout_ns = kStepTimeoutNs;
    const auto job =
        world_.table.Join({1000, "run", ""}, rank_, kRanks, options, session_.incarnation, sink_);
    // The rank's last session has ended: the rank is free, or a new generation begins.
    ASSERT_TRUE(job.ok()) << job.status();
    job_ = *job;
    LayoutRequest request;
    request.spec = Spec();
    request.deadline_ns = ~std::uint64_t{0};
    request.bucket_done_messages = rank_ == 0;
    const auto registered = job_->RegisterLayout(session_, request);
    if (!registered.ok()) {  // the job has ended
      Await<LayoutReadyMessage>();
      return;
    }
    channel_ = registered->channel;
    memory_ = std::make_unique<TrainerMemory>(registered->plan.arena_bytes, kBuckets);
    for (std::uint32_t b = 0; b < kBuckets; ++b) {
      offsets_[b] = registered->plan.buckets[b].offset;
    }
    Expect(job_->ArenaMapped(session_, channel_, memory_->Share()));
    if (!Await<LayoutReadyMessage>().has_value()) return;
    std::uint64_t sequence = 0;
    for (std::uint64_t step = 1; step <= kStepsPerGeneration; ++step) {
      if (!TakeStep(step)) return;
      if (step % 5 == 0 && !Operate(++sequence)) return;
    }
    Expect(job_->Leave(session_, /*exit=*/true));
    // The job ends when all ranks have left, or when a rank begins the next generation. In both
    // cases the session ends.
    const SessionMessage message = sink_->Next();
    EXPECT_TRUE(std::holds_alternative<SessionEndMessage>(message));
  }

  void Expect(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

  // False if the session has ended.
  bool TakeStep(std::uint64_t step) {
    std::uint32_t order[kMarks] = {0, 1, 2};
    std::shuffle(order, order + kMarks, random_);
    for (const std::uint32_t first : order) {
      if (Chance(60)) return Abandon(step);
      if (Chance(200)) return Die();
      std::vector<std::uint32_t> buckets;
      const std::uint32_t last = first + 1 < kMarks ? first : kBuckets - 1;
      for (std::uint32_t bucket = first; bucket <= last; ++bucket) {
        buckets.push_back(bucket);
        float* const data = memory_->At<float>(offsets_[bucket]);
        for (std::uint64_t i = 0; i < kCounts[bucket]; ++i) {
          data[i] = Gradient(rank_, step, bucket, i);
        }
      }
      Expect(job_->MarkReady(session_, channel_, step, buckets));
    }
    Expect(job_->EndStep(session_, channel_, step, ""));
    return AwaitVerdict(step, order[0]);
  }

  bool Abandon(std::uint64_t step) {
    Expect(job_->AbandonStep(session_, channel_, step, "no memory"));
    return AwaitVerdict(step, 0);
  }

  bool Die() {
    job_->Lose(session_,
               MakeError(absl::StatusCode::kAborted, Reason("DIED"), "its process has ended"));
    for (;;) {
      const SessionMessage message = sink_->Next();
      const auto* const end = std::get_if<SessionEndMessage>(&message);
      if (end == nullptr) continue;
      End(end->status);
      return false;
    }
  }

  // Waits for one bucket's semaphore word, as a trainer does, then for the verdict.
  bool AwaitVerdict(std::uint64_t step, std::uint32_t bucket) {
    while (!SemaphoreReleased(memory_->done(bucket), step) && sink_->Empty()) sched_yield();
    const bool released = SemaphoreReleased(memory_->done(bucket), step);
    const std::uint64_t void_step = memory_->void_step();
    const auto done = Await<StepDoneMessage>();
    if (!done.has_value()) return false;
    const StepRecord& record = *done->record;
    EXPECT_EQ(record.times.step, step);
    if (!record.verdict.ok()) {
      // A void step also releases the waits. The void step's number is then already visible.
      if (released && record.times.buckets[bucket].finish_ns == 0) {
        EXPECT_GE(void_step, step);
      }
      EXPECT_GE(memory_->void_step(), step);
      const std::string reason = DetailsOf(record.verdict).reason;
      EXPECT_TRUE(reason == "STEP_ABANDONED" || reason == "STEP_TIMEOUT") << record.verdict;
      world_.voided += rank_ == 0 ? 1 : 0;
      return true;
    }
    EXPECT_EQ(record.live_ranks, kRanks);
    for (std::uint32_t b = 0; b < kBuckets; ++b) ExpectAveraged(step, b);
    world_.complete += rank_ == 0 ? 1 : 0;
    return true;
  }

  void ExpectAveraged(std::uint64_t step, std::uint32_t bucket) {
    const float* const data = memory_->At<float>(offsets_[bucket]);
    for (std::uint64_t i = 0; i < kCounts[bucket]; ++i) {
      float sum = Gradient(0, step, bucket, i);
      for (std::uint32_t rank = 1; rank < kRanks; ++rank) sum += Gradient(rank, step, bucket, i);
      const float average = sum * static_cast<float>(1.0 / kRanks);
      if (data[i] != average) {
        ADD_FAILURE() << "step " << step << ", bucket " << bucket << " holds " << data[i]
                      << " instead of " << average << " at " << i;
        return;
      }
    }
  }

  // Runs a barrier, an all-reduce and a broadcast of two chunks. False if the session has ended.
  bool Operate(std::uint64_t sequence) {
    OperationSpec spec;
    spec.kind = static_cast<OperationKind>(sequence % 3);
    spec.root = spec.kind == OperationKind::kBroadcast ? 1 : 0;
    spec.bytes = spec.kind == OperationKind::kBroadcast ? kStagingBytes + 1 : 0;
    if (spec.kind == OperationKind::kAllReduce) {
      spec.dtype = DataType::kFloat32;
      spec.count = kStagingBytes / sizeof(float);
    }
    auto* const floats = reinterpret_cast<float*>(window_->bytes);
    for (std::uint64_t i = 0; i < kStagingBytes / sizeof(float); ++i) {
      floats[i] = Gradient(rank_, sequence, 0, i);
    }
    Expect(job_->Operate(session_, sequence, spec, {window_, window_->bytes, kStagingBytes},
                         ~std::uint64_t{0}));
    if (spec.kind == OperationKind::kBroadcast && !MoveChunks(sequence, spec)) return false;
    if (!Await<OperationDoneMessage>().has_value()) return false;
    for (std::uint64_t i = 0; i < spec.count; ++i) {
      float sum = Gradient(0, sequence, 0, i);
      for (std::uint32_t rank = 1; rank < kRanks; ++rank) sum += Gradient(rank, sequence, 0, i);
      EXPECT_EQ(floats[i], sum);
    }
    ++world_.operations;
    return true;
  }

  bool MoveChunks(std::uint64_t sequence, const OperationSpec& spec) {
    const std::uint64_t sizes[] = {kStagingBytes, 1};
    for (std::uint64_t chunk = 0; chunk < 2; ++chunk) {
      const auto ready = Await<ChunkReadyMessage>();
      if (!ready.has_value()) return false;
      EXPECT_EQ(ready->chunk, chunk);
      const std::byte mark{static_cast<unsigned char>(sequence + chunk)};
      if (rank_ == spec.root) {
        std::fill_n(window_->bytes, sizes[chunk], mark);
        Expect(job_->ChunkWritten(session_, sequence, chunk, sizes[chunk]));
      } else {
        EXPECT_EQ(ready->bytes, sizes[chunk]);
        EXPECT_EQ(window_->bytes[0], mark);
        EXPECT_EQ(window_->bytes[sizes[chunk] - 1], mark);
        Expect(job_->ChunkRead(session_, sequence, chunk));
      }
    }
    return true;
  }

  World& world_;
  const std::uint32_t rank_;
  std::mt19937 random_;
  RankSession session_;
  std::shared_ptr<WaitingSink> sink_;
  std::shared_ptr<Job> job_;
  std::uint32_t channel_ = 0;
  std::unique_ptr<TrainerMemory> memory_;
  std::uint64_t offsets_[kBuckets] = {};
  std::shared_ptr<Window> window_;
};

// The daemon's other work: clock ticks, lost leases and status requests.
void Disturb(World* world) {
  std::mt19937 random(99);
  std::uint64_t next_kill = 25, next_timeout = 10;
  while (!world->stop.load()) {
    world->table.Tick();
    const std::uint64_t steps = world->complete.load();
    const auto jobs = world->table.Jobs();
    const auto& job = jobs.empty() ? nullptr : jobs.front();
    if (job != nullptr) {
      const JobSnapshot snapshot = job->Snapshot();
      EXPECT_LE(snapshot.ranks.size(), kRanks);
      job->MissingInStep(1, steps);
      if (const auto timeline = job->Timeline("model", 8); timeline.has_value()) {
        EXPECT_LE(timeline->size(), 8u);
      }
      if (steps >= next_kill && !snapshot.ranks.empty()) {
        next_kill = steps + 25;
        const RankSnapshot& rank = snapshot.ranks[random() % snapshot.ranks.size()];
        job->Lose({rank.rank, rank.incarnation},
                  MakeError(absl::StatusCode::kAborted, Reason("DIED"), "its lease ran out"));
      }
    }
    if (steps >= next_timeout) {
      next_timeout = steps + 15;
      world->clock.Advance(kStepTimeoutNs);
    }
    world->clock.Advance(1);
    sched_yield();
  }
}

TEST(ConcurrencyTest, CompleteStepsHoldTheAverageAndVerdictsAgree) {
  World world;
  std::vector<std::thread> threads;
  std::atomic<std::uint32_t> running{kRanks};
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&world, &running, rank] {
      Trainer(&world, rank).Run();
      --running;
    });
  }
  std::thread disturber([&world] { Disturb(&world); });
  while (world.complete.load() < kStepsInAll && running.load() == kRanks) sched_yield();
  world.stop.store(true);
  while (running.load() > 0) {
    world.table.EndAll(
        MakeError(absl::StatusCode::kAborted, Reason("STOPPED"), "the test has ended"));
    sched_yield();
  }
  for (std::thread& thread : threads) thread.join();
  disturber.join();
  EXPECT_GE(world.complete.load(), kStepsInAll);
  EXPECT_GT(world.voided.load(), 0u);
  EXPECT_GT(world.lost.load(), 0u);
  EXPECT_GT(world.operations.load(), 0u);
  std::cout << world.complete.load() << " complete and " << world.voided.load() << " void steps, "
            << world.operations.load() << " operations, " << world.incarnations.load()
            << " sessions\n";
  world.table.Tick();
  for (const auto& job : world.table.Jobs()) EXPECT_TRUE(job->Empty());
}

TEST(ConcurrencyTest, RankMayJoinWhileAnotherIsLost) {
  World world;
  const JobKey key{1000, "run", ""};
  for (int i = 0; i < 3000; ++i) {
    const std::uint64_t first = ++world.incarnations, second = ++world.incarnations;
    const auto first_sink = std::make_shared<WaitingSink>();
    const auto second_sink = std::make_shared<WaitingSink>();
    const auto joined = world.table.Join(key, 0, 2, {}, first, first_sink);
    ASSERT_TRUE(joined.ok()) << joined.status();
    std::atomic<bool> go{false};
    std::thread loss([&] {
      while (!go.load()) {
      }
      (*joined)->Lose({0, first}, absl::AbortedError("its process has ended"));
    });
    go.store(true);
    const auto other = world.table.Join(key, 1, 2, {}, second, second_sink);
    loss.join();
    // It joins the old generation and learns of the loss, or it begins the next one.
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_EQ(second_sink->Empty(), *other != *joined);
    (*other)->Lose({1, second}, absl::AbortedError("done"));
    world.table.Tick();
  }
}

}  // namespace
}  // namespace gradsync::daemon
