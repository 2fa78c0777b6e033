// A rank of a job that another node coordinates. The test plays the coordinator and the session.

#include "daemon/peer/forwarding_job.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error.h"
#include "daemon/job/done_word_turns.h"
#include "daemon/job/layout_set.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"
#include "proto/gradsync/limits.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kIncarnation = 42;

class ForwardingJobTest : public testing::Test {
 protected:
  ForwardingJobTest() {
    JoinRequest join;
    join.key.job_id = "job";
    join.rank = 3;
    join.incarnation = kIncarnation;
    ForwardingJob::Context context;
    context.send = [this](v1::AttachRequest message) { sent_.push_back(std::move(message)); };
    context.executor = &executor_;
    context.coordinator = "alpha:7417";
    job_ = std::make_shared<ForwardingJob>(join, std::move(context), sink_,
                                           [this](const auto& joined) { joined_ = joined.ok(); });
    v1::SessionResponse opened;
    opened.mutable_session_opened()->set_generation(1);
    EXPECT_FALSE(Take(opened));
    EXPECT_TRUE(joined_);
    layout_.name = "model";
    layout_.explicit_buckets = {{DataType::kFloat32, 4}, {DataType::kFloat32, 4}};
  }

  // A valid message of the coordinator comes. True: it was the last one.
  bool Take(const v1::SessionResponse& response) {
    const absl::StatusOr<bool> last = job_->Take(response);
    EXPECT_TRUE(last.ok()) << last.status();
    return last.ok() && *last;
  }
  // The session delivers this message. Returns the request that the coordinator gets.
  v1::SessionRequest Deliver(const v1::SessionRequest& request, StagingMemory staging = {}) {
    sent_.clear();
    const auto call = [](Job*) -> absl::Status {
      ADD_FAILURE() << "there is no job here";
      return absl::OkStatus();
    };
    EXPECT_TRUE(job_->Deliver({&request, call, std::move(staging)}).ok());
    EXPECT_EQ(sent_.size(), 1u);
    if (sent_.size() != 1) return {};
    EXPECT_EQ(sent_[0].rank_request().rank(), 3u);
    EXPECT_EQ(sent_[0].rank_request().incarnation(), kIncarnation);
    return sent_[0].rank_request().request();
  }
  // The session registers the layout, and the coordinator assigns the channel to it. Returns what
  // becomes of the coordinator's message. If it is valid, the session gets the channel.
  absl::Status Assign(std::uint32_t channel, const LayoutSpec& layout) {
    LayoutRequest request;
    request.request_id = ++last_request_;
    request.spec = layout;
    request.messages = {std::make_shared<const v1::SessionRequest>()};
    bool answered = false;
    job_->RegisterLayout(job_->session(), request, [&](const auto& registration) {
      answered = registration.ok() && registration->channel == channel;
    });
    v1::SessionResponse response;
    Encode(*PlanLayout(layout, 4096), response.mutable_layout_assigned());
    response.mutable_layout_assigned()->set_request_id(last_request_);
    response.mutable_layout_assigned()->set_channel(channel);
    absl::Status taken = job_->Take(response).status();
    EXPECT_EQ(answered, taken.ok());
    return taken;
  }
  // The session has memory for the channel, and has mapped it.
  absl::Status MapMemory(std::uint32_t channel, const TrainerMemory& memory) {
    job_->KeepMemory(job_->session(), channel, memory.Share().arena);
    return job_->ArenaMapped(job_->session(), channel, memory.Share());
  }
  // Registers the layout and maps its memory.
  void Map(std::uint32_t channel) { Map(channel, memory_); }
  void Map(std::uint32_t channel, const TrainerMemory& memory) {
    ASSERT_TRUE(Assign(channel, layout_).ok());
    ASSERT_TRUE(MapMemory(channel, memory).ok());
  }
  static v1::Launch LaunchOf(std::uint32_t channel, std::uint32_t bucket, std::uint64_t count) {
    v1::Launch launch;
    launch.set_channel(channel);
    launch.set_bucket(bucket);
    launch.set_dtype(v1::DATA_TYPE_FLOAT32);
    launch.set_count(count);
    return launch;
  }
  // The coordinator refuses a layout for this reason. Returns the error that the session gets.
  absl::Status FailLayout(const google::rpc::Status& why) {
    LayoutRequest request;
    request.request_id = 1;
    request.spec = layout_;
    absl::Status answer;
    job_->RegisterLayout(job_->session(), request,
                         [&](const auto& registration) { answer = registration.status(); });
    v1::SessionResponse failed;
    failed.mutable_operation_failed()->set_layout(true);
    failed.mutable_operation_failed()->set_sequence(1);
    *failed.mutable_operation_failed()->mutable_status() = why;
    EXPECT_FALSE(Take(failed));
    return answer;
  }
  void TakeVoid(std::uint32_t channel, std::uint64_t step) {
    v1::SessionResponse done;
    done.mutable_step_done()->set_channel(channel);
    done.mutable_step_done()->set_step(step);
    done.mutable_step_done()->set_verdict(v1::VERDICT_VOID);
    EXPECT_FALSE(Take(done));
  }
  static v1::SessionRequest Release(std::uint32_t channel) {
    v1::SessionRequest request;
    request.mutable_release_layout()->set_channel(channel);
    return request;
  }
  static v1::SessionRequest EndStep(std::uint32_t channel, std::uint64_t step) {
    v1::SessionRequest request;
    request.mutable_end_step()->set_channel(channel);
    request.mutable_end_step()->set_step(step);
    request.mutable_end_step()->set_used_map("\x05");
    request.mutable_end_step()->set_ready_rest(true);
    return request;
  }

  LayoutSpec layout_;
  TrainerMemory memory_{4096, 2};
  ManualExecutor executor_;
  std::vector<v1::AttachRequest> sent_;
  std::shared_ptr<RecordingSink> sink_ = std::make_shared<RecordingSink>();
  bool joined_ = false;
  std::uint64_t last_request_ = 100;
  std::shared_ptr<ForwardingJob> job_;
};

TEST_F(ForwardingJobTest, ReleasedLayoutsMemoryIsFreedAtOnceBetweenSteps) {
  Map(1);
  executor_.RunAll();
  EXPECT_TRUE(memory_.Shared());
  Deliver(Release(1));
  executor_.RunAll();
  EXPECT_FALSE(memory_.Shared());
}

TEST_F(ForwardingJobTest, WorkBehindTheReleasesFindsTheMemoryFreed) {
  Map(1);
  Deliver(Release(1));
  EXPECT_TRUE(memory_.Shared());
  bool freed = false;
  job_->releases().Run([&] { freed = !memory_.Shared(); });
  executor_.RunAll();
  EXPECT_TRUE(freed);
}

TEST_F(ForwardingJobTest, ReleasedLayoutsMemoryIsKeptUntilTheRanksStepIsDecided) {
  Map(1);
  Deliver(EndStep(1, 1));
  Deliver(Release(1));
  executor_.RunAll();
  EXPECT_TRUE(memory_.Shared());  // the coordinator may launch on it
  v1::SessionResponse done;
  done.mutable_step_done()->set_channel(1);
  done.mutable_step_done()->set_step(1);
  EXPECT_FALSE(Take(done));
  executor_.RunAll();
  EXPECT_FALSE(memory_.Shared());
}

// Its memory would be that of the first layout, which may be smaller.
TEST_F(ForwardingJobTest, SecondLayoutOfAChannelIsMalformed) {
  Map(1);
  LayoutSpec larger = layout_;
  larger.explicit_buckets = {{DataType::kFloat32, 4}, {DataType::kFloat32, 4096}};
  const absl::Status assigned = Assign(1, larger);
  EXPECT_EQ(DetailsOf(assigned).reason, "MALFORMED") << assigned;
  EXPECT_FALSE(job_->layouts().MemoryOf(LaunchOf(1, 1, 4096)).ok());
  EXPECT_TRUE(job_->layouts().MemoryOf(LaunchOf(1, 1, 4)).ok()) << "the first layout is as it was";
}

// The mapper may still have the first layout's memory, and would hand it over for the second one.
TEST_F(ForwardingJobTest, ChannelOfAnEndedLayoutIsNotAssignedAgain) {
  Map(1);
  Deliver(Release(1));
  EXPECT_EQ(DetailsOf(Assign(1, layout_)).reason, "MALFORMED") << "its layout was released";
  ASSERT_TRUE(Assign(2, layout_).ok());
  v1::SessionResponse failed;
  failed.mutable_operation_failed()->set_layout(true);
  failed.mutable_operation_failed()->set_sequence(last_request_);
  EXPECT_FALSE(Take(failed));
  EXPECT_EQ(DetailsOf(Assign(2, layout_)).reason, "MALFORMED") << "its agreement has failed";
  EXPECT_TRUE(MapMemory(2, memory_).ok()) << "the rank does not know it yet";
  EXPECT_FALSE(job_->layouts().MemoryOf(LaunchOf(2, 1, 4)).ok());
  EXPECT_EQ(DetailsOf(Assign(0, layout_)).reason, "MALFORMED") << "the job's own channel";
  EXPECT_TRUE(Assign(3, layout_).ok());
}

// Another rank may have registered them in another order.
TEST_F(ForwardingJobTest, ChannelsComeInAnyOrder) {
  for (const std::uint32_t channel : {3, 1, 2, 7, 6, 5, 4}) {
    EXPECT_TRUE(Assign(channel, layout_).ok()) << channel;
  }
  for (std::uint32_t channel = 1; channel <= 7; ++channel) {
    EXPECT_EQ(DetailsOf(Assign(channel, layout_)).reason, "MALFORMED") << channel;
  }
  // It keeps a bounded number of those that may still come.
  constexpr std::uint32_t kFar = ~std::uint32_t{0};
  EXPECT_TRUE(Assign(kFar, layout_).ok());
  EXPECT_TRUE(Assign(kFar - 2 * kMaxLayouts, layout_).ok());
  EXPECT_FALSE(Assign(kFar - 2 * kMaxLayouts, layout_).ok());
  EXPECT_FALSE(Assign(kFar - 2 * kMaxLayouts - 1, layout_).ok());
  EXPECT_FALSE(Assign(kFar, layout_).ok());
}

TEST_F(ForwardingJobTest, OnlyMemoryOfTheLayoutIsMapped) {
  ASSERT_TRUE(Assign(1, layout_).ok());
  const auto expect_refused = [this](const absl::Status& mapped) {
    EXPECT_EQ(DetailsOf(mapped).reason, "PROTOCOL_VIOLATION") << mapped;
    EXPECT_FALSE(job_->layouts().MemoryOf(LaunchOf(1, 1, 4)).ok());
  };
  const TrainerMemory another(4096, 2), few_bytes(128, 2), few_semaphores(4096, 1);
  job_->KeepMemory(job_->session(), 1, memory_.Share().arena);
  expect_refused(job_->ArenaMapped(job_->session(), 1, another.Share()));
  expect_refused(MapMemory(1, few_bytes));
  expect_refused(MapMemory(1, few_semaphores));
  sent_.clear();
  EXPECT_TRUE(MapMemory(1, memory_).ok());
  EXPECT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(job_->layouts().MemoryOf(LaunchOf(1, 1, 4)).ok());
}

TEST_F(ForwardingJobTest, RefusedPlanLeavesTheLayoutOfItsChannelAlone) {
  Map(1);
  LayoutRequest request;
  request.request_id = 7;
  request.spec = layout_;
  absl::Status answer;
  job_->RegisterLayout(job_->session(), request,
                       [&](const auto& registration) { answer = registration.status(); });
  v1::SessionResponse other;
  other.mutable_layout_assigned()->set_request_id(7);
  other.mutable_layout_assigned()->set_channel(1);
  sent_.clear();
  EXPECT_FALSE(Take(other));
  EXPECT_EQ(DetailsOf(answer).reason, "VERSION") << answer;
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(sent_[0].has_refuse_layout());
  EXPECT_TRUE(job_->layouts().MemoryOf(LaunchOf(1, 1, 4)).ok());
}

// absl::StatusOr ends the process if it is made of an OK status.
TEST_F(ForwardingJobTest, LayoutThatFailsWithoutAReasonFails) {
  const absl::Status answer = FailLayout(google::rpc::Status());
  EXPECT_EQ(DetailsOf(answer).reason, "MALFORMED") << answer;
}

TEST_F(ForwardingJobTest, MessagesAreForwardedAsTheyCame) {
  std::vector<v1::SessionRequest> requests(10);
  requests[0].mutable_bucket_ready()->set_channel(1);
  requests[0].mutable_bucket_ready()->set_step(7);
  requests[0].mutable_bucket_ready()->add_buckets(2);
  requests[1] = EndStep(1, 7);
  requests[2].mutable_abandon_step()->set_reason("why");
  requests[3].mutable_barrier()->set_sequence(1);
  requests[3].mutable_barrier()->set_timeout_ms(1234);
  requests[4].mutable_broadcast()->set_sequence(2);
  requests[4].mutable_broadcast()->set_root(kRootIsLowestLive);
  requests[4].mutable_broadcast()->set_bytes(4096);
  requests[5].mutable_all_reduce()->set_sequence(3);
  requests[5].mutable_all_reduce()->set_dtype(v1::DATA_TYPE_FLOAT16);
  requests[5].mutable_all_reduce()->set_count(12);
  requests[5].mutable_all_reduce()->set_op(v1::REDUCE_OP_SUM);
  requests[6].mutable_chunk_written()->set_bytes(9);
  requests[7].mutable_leave()->set_exit(true);
  requests[8].mutable_query_step()->set_step(7);
  requests[9].mutable_release_layout()->set_channel(1);
  for (const v1::SessionRequest& request : requests) {
    EXPECT_EQ(Deliver(request).SerializeAsString(), request.SerializeAsString())
        << request.DebugString();
  }
}

TEST_F(ForwardingJobTest, AnswersGoBackAsTheyCame) {
  v1::SessionResponse state;
  state.mutable_step_state()->set_step(7);
  state.mutable_step_state()->set_missing("rank 1");
  EXPECT_FALSE(Take(state));
  const auto forwarded = sink_->Of<ForwardedMessage>();
  ASSERT_EQ(forwarded.size(), 1u);
  EXPECT_EQ(forwarded[0].response->SerializeAsString(), state.SerializeAsString());
  EXPECT_TRUE(sink_->AllFlushed());
}

TEST_F(ForwardingJobTest, NoticesAboutLateRanksGoBackAsTheyCame) {
  v1::SessionResponse notice;
  notice.mutable_still_waiting()->set_text(
      "operation 1 (barrier) after 5s: rank 1 has not called it");
  EXPECT_FALSE(Take(notice));
  const auto forwarded = sink_->Of<ForwardedMessage>();
  ASSERT_EQ(forwarded.size(), 1u);
  EXPECT_EQ(forwarded[0].response->SerializeAsString(), notice.SerializeAsString());
}

TEST_F(ForwardingJobTest, LaunchesFindTheMemory) {
  Map(1);
  v1::Launch launch = LaunchOf(1, 1, 5);
  EXPECT_FALSE(job_->layouts().MemoryOf(launch).ok());  // of another size
  const auto plan = PlanLayout(layout_, 10);
  launch.set_count(4);
  const auto memory = job_->layouts().MemoryOf(launch);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->data, memory_.data() + plan->buckets[1].offset);
  launch.set_bucket(2);
  EXPECT_EQ(DetailsOf(job_->layouts().MemoryOf(launch).status()).reason, "MALFORMED");

  launch.set_channel(0);
  EXPECT_FALSE(job_->layouts().MemoryOf(launch).ok());
  std::byte window[64] = {};
  v1::SessionRequest barrier;
  barrier.mutable_barrier()->set_sequence(1);
  Deliver(barrier, {nullptr, window, sizeof(window)});
  launch.set_count(16);
  EXPECT_EQ(job_->layouts().MemoryOf(launch)->data, window);
  launch.set_count(17);
  EXPECT_FALSE(job_->layouts().MemoryOf(launch).ok());
}

TEST_F(ForwardingJobTest, KnowsHowFarAStepIs) {
  Map(1);
  EXPECT_FALSE(job_->layouts().InStep());
  v1::SessionRequest ready;
  ready.mutable_bucket_ready()->set_channel(1);
  ready.mutable_bucket_ready()->set_step(1);
  ready.mutable_bucket_ready()->add_buckets(0);
  Deliver(ready);
  EXPECT_TRUE(job_->layouts().InStep());
  EXPECT_FALSE(job_->layouts().InDoubt());
  Deliver(EndStep(1, 1));
  EXPECT_TRUE(job_->layouts().InDoubt());
  TakeVoid(1, 1);
  EXPECT_FALSE(job_->layouts().InStep());
  EXPECT_FALSE(job_->layouts().InDoubt());
  EXPECT_EQ(memory_.void_step(), 1u);
  EXPECT_EQ(memory_.done(1), 1u);
}

TEST_F(ForwardingJobTest, MemoryIsKeptUntilTheCoordinatorEndsTheRank) {
  Map(1);
  job_->Lose(job_->session(), absl::AbortedError("its process has ended"));
  executor_.RunAll();
  EXPECT_TRUE(memory_.Shared());
  v1::SessionResponse ending;
  *ending.mutable_session_ending()->mutable_status() = ToProto(absl::AbortedError("lost"));
  EXPECT_TRUE(Take(ending));
  executor_.RunAll();
  EXPECT_FALSE(memory_.Shared());
  // Memory that comes late is freed at once.
  const auto late = std::make_shared<int>(1);
  job_->KeepMemory(job_->session(), 1, late);
  executor_.RunAll();
  EXPECT_EQ(late.use_count(), 1);
  const auto ends = sink_->Of<SessionEndMessage>();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].status.message(), "its process has ended");
}

// The rank is lost, and the link asks once in a second whether the coordinator's answer is overdue.
class OwedEndTest : public ForwardingJobTest {
 protected:
  static constexpr std::uint64_t kSecondNs = 1'000'000'000;

  OwedEndTest() {
    EXPECT_FALSE(Ask(0)) << "the rank lives";
    EXPECT_FALSE(Ask(1000)) << "the rank lives";
    job_->Lose(job_->session(), absl::AbortedError("its process has ended"));
    EXPECT_FALSE(Ask(1000)) << "its time begins now";
  }

  bool Ask(std::uint64_t seconds_later, bool excused = false) {
    now_ns_ += seconds_later * kSecondNs;
    return job_->EndIsOverdue(now_ns_, excused);
  }
  // The second in which the answer is overdue. The coordinator is excused in every
  // `excused_every`-th one. 0: the answer is not overdue within an hour.
  int OverdueIn(int excused_every) {
    for (int second = 1; second <= 3600; ++second) {
      if (Ask(1, second % excused_every == 0)) return second;
    }
    return 0;
  }

  std::uint64_t now_ns_ = kSecondNs;
};

constexpr int kNever = 1'000'000;
constexpr int kAlways = 1;

TEST_F(OwedEndTest, IsOverdueAfterItsTime) { EXPECT_EQ(OverdueIn(kNever), 31); }

// Three of 33 seconds are excused.
TEST_F(OwedEndTest, AnExcuseBeginsNoNewTime) { EXPECT_EQ(OverdueIn(10), 33); }

TEST_F(OwedEndTest, ACoordinatorThatIsAlwaysExcusedHasTenTimesAsLong) {
  EXPECT_EQ(OverdueIn(kAlways), 301);
}

TEST_F(OwedEndTest, OfALongPauseOneSecondCounts) {
  EXPECT_FALSE(Ask(3600));
  EXPECT_EQ(OverdueIn(kNever), 30);
}

TEST_F(OwedEndTest, NothingIsOwedAfterTheAnswer) {
  v1::SessionResponse ending;
  *ending.mutable_session_ending()->mutable_status() = ToProto(absl::AbortedError("lost"));
  EXPECT_TRUE(Take(ending));
  EXPECT_EQ(OverdueIn(kNever), 0);
}

// The message after which a stream ends waits, however much its trainer has left unread.
// The coordinator ends the job while the rank joins. It keeps the rank until it hears of the end.
TEST_F(ForwardingJobTest, ARankWhoseEndComesBeforeItsStartReportsItsEnd) {
  JoinRequest join;
  join.key.job_id = "job";
  join.incarnation = kIncarnation + 1;
  ForwardingJob::Context context;
  context.send = [this](v1::AttachRequest message) { sent_.push_back(std::move(message)); };
  context.executor = &executor_;
  absl::Status answer;
  ForwardingJob joining(join, std::move(context), sink_,
                        [&](const auto& joined) { answer = joined.status(); });
  v1::SessionResponse ending;
  ending.mutable_session_ending()->mutable_status()->set_code(10);
  ASSERT_TRUE(joining.Take(ending).value());
  EXPECT_TRUE(absl::IsAborted(answer)) << answer;
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].rank_ended().incarnation(), kIncarnation + 1);
}

TEST_F(ForwardingJobTest, ACoordinatorsErrorsAreClipped) {
  const google::rpc::Status why = ToProto(absl::AbortedError(std::string(1 << 20, 'x')));
  EXPECT_EQ(FailLayout(why).message().size(), 4096u);
  v1::SessionResponse ending;
  *ending.mutable_session_ending()->mutable_status() = why;
  EXPECT_TRUE(Take(ending));
  const auto ends = sink_->Of<SessionEndMessage>();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].status.message().size(), 4096u);
}

// Each of 1,000 small parts takes two bytes on the wire.
TEST_F(ForwardingJobTest, AForwardedMessageCountsForItsMemory) {
  v1::SessionResponse done;
  for (int i = 0; i < 1000; ++i) done.mutable_step_done()->add_buckets();
  EXPECT_FALSE(Take(done));
  const auto forwarded = sink_->Of<ForwardedMessage>();
  ASSERT_EQ(forwarded.size(), 1u);
  EXPECT_GE(forwarded[0].bytes, 1000 * sizeof(v1::BucketTimes));
  while (done.SpaceUsedLong() <= std::size_t{kMaxCoordinatorMessageBytes}) {
    for (int i = 0; i < 10'000; ++i) done.mutable_step_done()->add_buckets();
  }
  EXPECT_EQ(DetailsOf(job_->Take(done).status()).reason, "MALFORMED");
  EXPECT_EQ(sink_->Of<ForwardedMessage>().size(), 1u);
}

// Its done words take the executor three turns.
class LargeLayoutTest : public ForwardingJobTest {
 protected:
  static constexpr std::size_t kPerTurn = kSignalsPerTurn;
  static constexpr std::size_t kBuckets = 2 * kPerTurn + 500;
  static_assert(kBuckets <= 4096);

  LargeLayoutTest() {
    layout_.explicit_buckets.assign(kBuckets, {DataType::kFloat32, 4});
    Map(1, large_);
  }

  // How many done words have this value.
  std::size_t Words(std::uint64_t step) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < kBuckets; ++i) count += large_.done(i) == step ? 1 : 0;
    return count;
  }
  // Launches as the coordinator does. Returns the page that gets the done word.
  std::shared_ptr<SemaphorePage> Launch(std::size_t bucket, std::uint64_t step) {
    v1::Launch launch = LaunchOf(1, static_cast<std::uint32_t>(bucket), 4);
    launch.set_number(step);
    const auto memory = job_->layouts().MemoryOf(launch);
    EXPECT_TRUE(memory.ok()) << memory.status();
    return memory.ok() ? memory->semaphores : nullptr;
  }

  // After the buckets the arena has the verdict, and is as long as whole pages.
  TrainerMemory large_{kBuckets * kBucketAlignment + 8192, kBuckets};
};

TEST_F(LargeLayoutTest, ExecutorWritesTheWordsOfAVoidStepInTurns) {
  TakeVoid(1, 1);
  EXPECT_EQ(large_.void_step(), 1u);
  EXPECT_EQ(Words(1), 0u) << "this thread has other jobs to serve";
  EXPECT_EQ(sink_->Of<ForwardedMessage>().size(), 1u);
  ASSERT_EQ(executor_.pending(), 1u);
  executor_.RunNext();
  EXPECT_EQ(Words(1), kPerTurn);
  ASSERT_EQ(executor_.pending(), 1u) << "other users have their turns in between";
  executor_.RunAll();
  EXPECT_EQ(Words(1), kBuckets);
}

TEST_F(LargeLayoutTest, NoWordGoesBackFromALaterStep) {
  TakeVoid(1, 1);
  executor_.RunNext();
  for (const std::size_t bucket : {std::size_t{0}, kPerTurn, kBuckets - 1}) {
    const std::shared_ptr<SemaphorePage> page = Launch(bucket, 2);
    ASSERT_NE(page, nullptr);
    EXPECT_EQ(large_.done(bucket), 1u) << "bucket " << bucket << ": its waits are released first";
    page->SignalDone(bucket, 2);
  }
  executor_.RunAll();
  EXPECT_EQ(Words(2), 3u);
  EXPECT_EQ(Words(1), kBuckets - 3);
}

TEST_F(LargeLayoutTest, LaunchOfALaterStepThatIsNotDoneLeavesItsWord) {
  TakeVoid(1, 1);
  Launch(kBuckets - 1, 2);
  executor_.RunAll();
  EXPECT_EQ(Words(1), kBuckets);
}

TEST_F(LargeLayoutTest, LaterVoidStepTakesOver) {
  TakeVoid(1, 1);
  executor_.RunNext();
  TakeVoid(1, 2);
  EXPECT_EQ(large_.void_step(), 2u);
  EXPECT_EQ(executor_.pending(), 1u) << "a layout has one piece of work at a time";
  executor_.RunNext();
  EXPECT_EQ(Words(1), kPerTurn);
  EXPECT_EQ(Words(2), kPerTurn);
  executor_.RunAll();
  EXPECT_EQ(Words(2), kBuckets);
}

TEST_F(LargeLayoutTest, EveryWordHasItsTurnWhileStepAfterStepIsVoid) {
  for (std::uint64_t step = 1; step <= 3; ++step) {
    TakeVoid(1, step);
    executor_.RunNext();
  }
  EXPECT_EQ(Words(0), 0u);
}

TEST_F(LargeLayoutTest, WordsOfAReleasedLayoutAreLeftAlone) {
  TakeVoid(1, 1);
  executor_.RunNext();
  Deliver(Release(1));
  executor_.RunAll();
  EXPECT_EQ(Words(1), kPerTurn) << "the client library has written poison there";
  EXPECT_FALSE(large_.Shared());
}

TEST_F(LargeLayoutTest, WordsOfAnEndedRankAreLeftAlone) {
  TakeVoid(1, 1);
  v1::SessionResponse ending;
  *ending.mutable_session_ending()->mutable_status() = ToProto(absl::AbortedError("lost"));
  EXPECT_TRUE(Take(ending));
  job_ = nullptr;
  executor_.RunAll();
  EXPECT_EQ(Words(1), 0u);
  EXPECT_FALSE(large_.Shared());
}

TEST_F(LargeLayoutTest, ResumedRankGetsTheWordsOfTheStepsThatItHasMissed) {
  v1::SessionResponse resumed;
  auto* const next = resumed.mutable_leave_done()->add_next_steps();
  next->set_channel(1);
  next->set_step(8);
  EXPECT_FALSE(Take(resumed));
  EXPECT_EQ(Words(7), 0u);
  executor_.RunAll();
  EXPECT_EQ(Words(7), kBuckets);
  EXPECT_EQ(large_.void_step(), 0u);
}

// An entry costs the coordinator a few bytes, and this node a system call for each bucket.
TEST_F(ForwardingJobTest, AMalformedLeaveDoneChangesNothing) {
  Map(1);
  const auto expect_malformed = [this](const v1::SessionResponse& response) {
    const absl::StatusOr<bool> taken = job_->Take(response);
    EXPECT_EQ(DetailsOf(taken.status()).reason, "MALFORMED") << response.ShortDebugString();
    EXPECT_EQ(memory_.done(0), 0u);
    EXPECT_TRUE(sink_->Of<ForwardedMessage>().empty());
  };
  const auto add = [](v1::SessionResponse* response, std::uint32_t channel, std::uint64_t step) {
    auto* const next = response->mutable_leave_done()->add_next_steps();
    next->set_channel(channel);
    next->set_step(step);
  };
  v1::SessionResponse twice, zero, many;
  add(&twice, 1, 8);
  add(&twice, 2, 8);
  add(&twice, 1, 9);
  expect_malformed(twice);
  add(&zero, 1, 8);
  add(&zero, 2, 0);
  expect_malformed(zero);
  for (std::uint32_t channel = 1; channel <= 2 * kMaxLayouts + 1; ++channel) add(&many, channel, 8);
  expect_malformed(many);
  // The job may have layouts that this rank has released.
  many.mutable_leave_done()->mutable_next_steps()->RemoveLast();
  EXPECT_FALSE(Take(many));
  EXPECT_EQ(memory_.done(0), 7u);
}

TEST(AgentLayoutsTest, SameBucketsComparesEveryBucket) {
  LayoutSpec spec;
  spec.parameters = {{"a", {2, 3}, DataType::kBfloat16}, {"b", {}, DataType::kFloat64}};
  const auto plan = PlanLayout(spec, 100);
  ASSERT_TRUE(plan.ok());
  v1::LayoutAssigned assigned;
  Encode(*plan, &assigned);
  EXPECT_TRUE(SameBuckets(*plan, assigned));
  v1::LayoutAssigned other = assigned;
  other.mutable_buckets(0)->set_count(12345);
  EXPECT_FALSE(SameBuckets(*plan, other));
  other = assigned;
  other.mutable_buckets()->RemoveLast();
  EXPECT_FALSE(SameBuckets(*plan, other));
  other = assigned;
  other.set_arena_bytes(1);
  EXPECT_FALSE(SameBuckets(*plan, other));
}

}  // namespace
}  // namespace gradsync::daemon
