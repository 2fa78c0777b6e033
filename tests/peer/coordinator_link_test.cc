// A link to a coordinator that a trainer has chosen. The test plays the coordinator and a session.
// The stream never begins, so gRPC is not called. Its messages stay in its queue.

#include "daemon/peer/coordinator_link.h"
#include "daemon/peer/user_rate.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error.h"
#include "daemon/rpc/encode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint64_t kIncarnation = 42;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr Tenant kUser(1000);

class CoordinatorLinkTest : public testing::Test {
 protected:
  CoordinatorLinkTest() {
    link_->OnMessage(Welcome());
    EXPECT_TRUE(link_->Join(JoinMessage(), sink_, [this](absl::StatusOr<Joined> joined) {
      ASSERT_TRUE(joined.ok()) << joined.status();
      rank_ = joined->job;
    }));
    v1::AttachResponse opened;
    opened.mutable_rank_response()->set_incarnation(kIncarnation);
    opened.mutable_rank_response()->mutable_response()->mutable_session_opened();
    link_->OnMessage(opened);
    EXPECT_NE(rank_, nullptr);
  }

  LinkContext Context() {
    LinkContext context;
    context.payer = kUser;
    context.memory = &memory_;
    context.instance = std::string(kInstanceBytes, 'b');
    context.node_name = "beta";
    context.executor = &executor_;
    context.reaper = &reaper_;
    context.clock = &clock_;
    context.tls = true;  // otherwise the kernel is asked who answers
    context.sockets = std::make_shared<DialedSockets>(/*plain_text=*/false);
    context.engine_rate = std::make_shared<UserRate>(/*burst=*/64);
    return context;
  }
  JoinRequest JoinMessage() const {
    JoinRequest join;
    join.key = kKey;
    join.rank = 1;
    join.world_size = 2;
    join.incarnation = kIncarnation;
    join.message = std::make_shared<const v1::OpenSession>();
    return join;
  }
  static v1::AttachResponse Welcome(const std::string& node_name = "alpha") {
    v1::AttachResponse message;
    message.mutable_welcome()->set_instance(std::string(kInstanceBytes, 'a'));
    message.mutable_welcome()->set_node_name(node_name);
    return message;
  }
  // The session delivers a message of so many buckets, each of one byte.
  void MarkReady(int buckets) {
    v1::SessionRequest request;
    request.mutable_bucket_ready()->set_channel(1);
    request.mutable_bucket_ready()->set_step(1);
    request.mutable_bucket_ready()->mutable_buckets()->Resize(buckets, 1);
    const auto call = [](Job*) { return absl::OkStatus(); };
    EXPECT_TRUE(rank_->Deliver({&request, call, {}}).ok());
  }

  const JobKey kKey{1000, "job", ""};
  ManualClock clock_;
  ArenaQuota memory_{4 * kMiB, "quota_control_bytes_per_user", "the daemon's own memory"};
  ManualExecutor executor_;
  ConcurrentExecutor reaper_{1};
  std::shared_ptr<RecordingSink> sink_ = std::make_shared<RecordingSink>();
  std::shared_ptr<JobPort> rank_;
  std::shared_ptr<CoordinatorLink> link_ = CoordinatorLink::Create(Context(), "alpha:7417", kKey);
};

// The link keeps the name, and every rank's error has it.
TEST_F(CoordinatorLinkTest, ACoordinatorWhoseNodeHasNoNameIsRefused) {
  for (const std::string& name : {std::string(), std::string(65, 'x'), std::string("a\nb")}) {
    const auto link = CoordinatorLink::Create(Context(), "alpha:7417", kKey);
    absl::Status answer;
    ASSERT_TRUE(
        link->Join(JoinMessage(), sink_, [&](const auto& joined) { answer = joined.status(); }));
    link->OnMessage(Welcome(name));
    EXPECT_EQ(DetailsOf(answer).reason, "COORDINATOR_REFUSED") << answer;
    EXPECT_THAT(std::string(answer.message()), HasSubstr("its node's name is empty, too long or"));
    EXPECT_TRUE(link->ended());
  }
}

// Tick() may come before Dial(): the table can find the link first. A rank may be impatient.
TEST_F(CoordinatorLinkTest, ALinkThatIsNotDialedYetIsNotProbed) {
  const auto link = CoordinatorLink::Create(Context(), "alpha:7417", kKey);
  JoinRequest join = JoinMessage();
  join.patience_ns = 1;
  bool answered = false;
  ASSERT_TRUE(link->Join(join, sink_, [&](const auto&) { answered = true; }));
  clock_.Advance(2);
  link->Tick(clock_.NowNs());
  EXPECT_FALSE(answered);
  link->EndRanks(absl::CancelledError("the test ends"));
}

TEST_F(CoordinatorLinkTest, AMalformedMessageOfARankEndsTheLinkByName) {
  v1::AttachResponse message;
  message.mutable_rank_response()->set_incarnation(kIncarnation);
  v1::LeaveDone& done = *message.mutable_rank_response()->mutable_response()->mutable_leave_done();
  for (int i = 0; i < 2; ++i) done.add_next_steps()->set_channel(1);
  for (v1::NextStep& next : *done.mutable_next_steps()) next.set_step(1);
  link_->OnMessage(message);
  link_->OnEnd(absl::OkStatus());
  const auto ends = sink_->Of<SessionEndMessage>();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(DetailsOf(ends[0].status).reason, "COORDINATOR_LOST");
  EXPECT_THAT(std::string(ends[0].status.message()),
              HasSubstr("known because its LeaveDone names channel 1 twice"));
}

TEST_F(CoordinatorLinkTest, AChannelThatIsNotFreeEndsTheLinkByName) {
  LayoutRequest request;
  request.request_id = 1;
  request.spec.explicit_buckets = {{DataType::kFloat32, 4}};
  rank_->RegisterLayout({1, kIncarnation}, request,
                        [](const auto&) { ADD_FAILURE() << "it has no channel"; });
  v1::AttachResponse message;
  message.mutable_rank_response()->set_incarnation(kIncarnation);
  auto* const assigned =
      message.mutable_rank_response()->mutable_response()->mutable_layout_assigned();
  Encode(*PlanLayout(request.spec, 1), assigned);
  assigned->set_request_id(1);
  assigned->set_channel(0);
  link_->OnMessage(message);
  link_->OnEnd(absl::OkStatus());
  const auto ends = sink_->Of<SessionEndMessage>();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(DetailsOf(ends[0].status).reason, "COORDINATOR_LOST");
  EXPECT_THAT(std::string(ends[0].status.message()),
              HasSubstr("known because it assigned channel 0 to a layout of rank 1, but"));
}

// Why the link has ended after so many orders to connect an engine, the last one 250 ms later.
class ConnectedEngines : public CoordinatorLinkTest {
 protected:
  std::string CauseAfter(int engines) {
    v1::AttachResponse message;
    message.mutable_connect_engine();  // of no nodes: refused, and counted nevertheless
    for (int i = 1; i < engines; ++i) link_->OnMessage(message);
    clock_.Advance(250'000'000);
    link_->OnMessage(message);
    link_->OnEnd(absl::OkStatus());
    const auto ends = sink_->Of<SessionEndMessage>();
    return ends.size() == 1 ? std::string(ends[0].status.message()) : "it has not ended";
  }
};

TEST_F(ConnectedEngines, CoordinatorMayConnectManyAndRegainsOne) {
  EXPECT_THAT(CauseAfter(65), HasSubstr("the connection to it has ended"));
}

TEST_F(ConnectedEngines, OneMoreEndsTheLinkByNameAndIsHarm) {
  EXPECT_THAT(CauseAfter(66), HasSubstr("coordinators connect engines too often"));
  EXPECT_TRUE(link_->HasHarmed());
}

// Otherwise a user's quota would be used up by trainers that have ended long ago.
TEST_F(CoordinatorLinkTest, ARankWhoseTrainerGivesUpWaitsNoLongerForTheCoordinator) {
  const auto link = CoordinatorLink::Create(Context(), "alpha:7417", kKey);
  std::vector<absl::Status> answers(2);
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (absl::Status& answer : answers) {
    sinks.push_back(std::make_shared<RecordingSink>());
    JoinRequest join = JoinMessage();
    join.patience_ns = 600'000'000'000;
    ASSERT_TRUE(
        link->Join(join, sinks.back(), [&](const auto& joined) { answer = joined.status(); }));
  }
  sinks[1]->Abandon();
  link->Tick(clock_.NowNs());
  EXPECT_TRUE(answers[0].ok()) << "it still waits";
  EXPECT_EQ(DetailsOf(answers[1]).reason, "STREAM_ENDED") << answers[1];
  EXPECT_FALSE(link->ended());
  sinks[0]->Abandon();
  link->Tick(clock_.NowNs());
  EXPECT_EQ(DetailsOf(answers[0]).reason, "STREAM_ENDED") << answers[0];
  EXPECT_TRUE(link->ended()) << "nobody needs it";
}

// The session of rank 1 ends. Rank 0 is on this node, too, and goes on.
class EndingRankTest : public CoordinatorLinkTest {
 protected:
  EndingRankTest() {
    JoinRequest join = JoinMessage();
    join.rank = 0;
    join.incarnation = kIncarnation + 1;
    EXPECT_TRUE(link_->Join(join, other_, [](const auto&) {}));
    v1::AttachResponse opened;
    opened.mutable_rank_response()->set_incarnation(join.incarnation);
    opened.mutable_rank_response()->mutable_response()->mutable_session_opened();
    link_->OnMessage(opened);
    rank_->Lose({1, kIncarnation}, absl::AbortedError("its process has ended"));
  }

  // The coordinator lives, and so does this daemon.
  void TickFor(int seconds) {
    v1::AttachResponse ping;
    ping.mutable_ping();
    for (int i = 0; i < seconds; ++i) {
      clock_.Advance(kSecondNs);
      link_->OnMessage(ping);
      link_->Tick(clock_.NowNs());
    }
  }
  // Ends the stream, and returns the message that rank 0 gets.
  std::string WhyTheLinkEnded() {
    link_->OnEnd(absl::OkStatus());
    const auto ends = other_->Of<SessionEndMessage>();
    EXPECT_EQ(ends.size(), 1u);
    return ends.empty() ? "" : std::string(ends[0].status.message());
  }

  static constexpr std::uint64_t kSecondNs = 1'000'000'000;
  static constexpr char kTooLate[] = "it did not end the session of rank 1 within 30 s";
  std::shared_ptr<RecordingSink> other_ = std::make_shared<RecordingSink>();
};

// Otherwise the rank's memory would be kept for as long as the coordinator likes.
TEST_F(EndingRankTest, ACoordinatorThatDoesNotEndASessionEndsTheLinkByName) {
  TickFor(32);
  EXPECT_THAT(WhyTheLinkEnded(), HasSubstr(kTooLate));
}

TEST_F(EndingRankTest, TheCoordinatorHasTimeToEndASession) {
  TickFor(30);
  EXPECT_THAT(WhyTheLinkEnded(), Not(HasSubstr(kTooLate)));
}

TEST_F(EndingRankTest, ACoordinatorThatDoesNotAnswerATrainerThatGaveUpEndsTheLink) {
  const auto link = CoordinatorLink::Create(Context(), "alpha:7417", kKey);
  link->OnMessage(Welcome());
  absl::Status answer;
  ASSERT_TRUE(
      link->Join(JoinMessage(), sink_, [&](const auto& joined) { answer = joined.status(); }));
  sink_->Abandon();
  v1::AttachResponse ping;
  ping.mutable_ping();
  for (int i = 0; i < 32; ++i) {
    clock_.Advance(kSecondNs);
    link->OnMessage(ping);
    link->Tick(clock_.NowNs());
  }
  link->OnEnd(absl::OkStatus());
  EXPECT_EQ(DetailsOf(answer).reason, "COORDINATOR_LOST") << answer;
  EXPECT_THAT(std::string(answer.message()), HasSubstr(kTooLate));
}

TEST_F(EndingRankTest, ASessionThatTheCoordinatorHasEndedIsNoReason) {
  TickFor(20);
  v1::AttachResponse ending;
  ending.mutable_rank_response()->set_incarnation(kIncarnation);
  ending.mutable_rank_response()->mutable_response()->mutable_session_ending();
  link_->OnMessage(ending);
  EXPECT_EQ(sink_->Of<SessionEndMessage>().size(), 1u);
  TickFor(60);
  EXPECT_THAT(WhyTheLinkEnded(), Not(HasSubstr(kTooLate)));
}

TEST_F(EndingRankTest, ThisDaemonsOwnStopsDoNotCount) {
  TickFor(20);
  for (int stop = 0; stop < 5; ++stop) {
    clock_.Advance(20 * kSecondNs);
    TickFor(1);
  }
  TickFor(10);
  EXPECT_THAT(WhyTheLinkEnded(), Not(HasSubstr(kTooLate)));
}

// Another user's status call copies nothing of this job.
TEST_F(CoordinatorLinkTest, StatusIsThatOfWantedJobs) {
  const auto all = link_->Snapshot([](const RemoteJobOwners& job) {
    return job.uid == 1000 && job.job_id == "job" && job.incarnations.count(kIncarnation) == 1;
  });
  ASSERT_TRUE(all.has_value());
  EXPECT_EQ(all->node_name, "alpha");
  EXPECT_EQ(all->incarnations.size(), 1u);
  EXPECT_FALSE(link_->Snapshot([](const RemoteJobOwners&) { return false; }).has_value());
}

TEST_F(CoordinatorLinkTest, AFewUnreadMessagesCostTheirUserNothing) {
  for (int i = 0; i < 100; ++i) MarkReady(8);
  EXPECT_EQ(memory_.total_bytes(), 0u);
}

// 64 KiB on the wire, four times as much in memory.
TEST_F(CoordinatorLinkTest, UnreadMessagesAreChargedForTheirMemory) {
  constexpr int kBuckets = 60'000;
  for (int i = 0; i < 8; ++i) MarkReady(kBuckets);
  EXPECT_GT(memory_.bytes_of(kUser), 8 * kBuckets * sizeof(std::uint32_t));
}

TEST_F(CoordinatorLinkTest, ACoordinatorThatDoesNotReadEndsTheLinkAtTheUsersQuota) {
  for (int i = 0; i < 100; ++i) MarkReady(60'000);
  EXPECT_GT(memory_.bytes_of(kUser), 3 * kMiB) << "what waits is the user's";
  link_->OnEnd(absl::OkStatus());
  const auto ends = sink_->Of<SessionEndMessage>();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(DetailsOf(ends[0].status).reason, "COORDINATOR_LOST");
  EXPECT_THAT(std::string(ends[0].status.message()), HasSubstr("it was disconnected: it left "));
  EXPECT_THAT(std::string(ends[0].status.message()),
              HasSubstr("of a quota of 4194304 (quota_control_bytes_per_user): ask for less"));
  executor_.RunAll();
  link_ = nullptr;
  EXPECT_EQ(memory_.total_bytes(), 0u);
}

}  // namespace
}  // namespace gradsync::daemon
