// Hostile clients send too much, read nothing or overwrite their memory. The daemon limits each of
// them and continues to serve others.

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/raw_session.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"
#include "tests/kit/process_memory.h"

namespace gradsync::fault {
namespace {

constexpr int kResourceExhausted = 8;

void ExpectServesOn(const TestDaemon& daemon) {
  const auto trainers = JoinedTrainers(daemon, 2, "afterwards");
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step times=2");
  ExpectAll(trainers, "leave");
}

bool NothingHeld(const v1::GetStatusResponse& status) { return status.arena_bytes() == 0; }

TEST(HalfRegisteredSession, LeavesNothingBehind) {
  TestDaemon daemon;
  for (int point = 0; point < 5; ++point) {
    const std::string job = "half" + std::to_string(point);
    RawSession rank(daemon.socket());
    ASSERT_TRUE(rank.Open(0, 2, job).has_value());
    if (point >= 1) {
      const auto assigned = rank.Register(RawSession::LayoutRequest(4, 100'000));
      ASSERT_TRUE(assigned.has_value());
      EXPECT_GT(daemon.Status().arena_bytes(), 4u * 400'000);
      std::shared_ptr<RawMemory> arena;
      if (point >= 2) arena = rank.Map(*assigned, daemon.side_socket());
      if (point >= 3) {
        ASSERT_TRUE(rank.Mapped(assigned->channel()));
      }
      if (point >= 4) {
        ASSERT_TRUE(rank.Register(RawSession::LayoutRequest(2, 10, "b")).has_value());
      }
    }
    EXPECT_GT(daemon.CountDescriptors("memfd:gradsync"), 0);
    rank.Cancel();
    rank.End();
    EXPECT_TRUE(daemon.AwaitStatus(NothingHeld)) << "lost at point " << point;
    EXPECT_EQ(daemon.CountDescriptors("memfd:gradsync"), 0) << "lost at point " << point;
    const auto status = daemon.Status();
    for (const auto& one : status.jobs()) {
      EXPECT_EQ(one.sessions_size(), 0) << one.ShortDebugString();
    }
  }
  ExpectServesOn(daemon);
}

TEST(TooLargeMessage, IsRefusedByName) {
  TestDaemon daemon;
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 1, "job").has_value());
  rank.Send(RawSession::LayoutRequest(1, 1, std::string(100'000, 'n')));
  const RawStatus end = rank.End();
  EXPECT_EQ(end.code, kResourceExhausted) << end;
  EXPECT_NE(end.message.find("larger than max"), std::string::npos) << end;
  ExpectServesOn(daemon);
}

TEST(LongLayout, ComesInParts) {
  TestDaemon daemon;
  Trainer trainer(daemon, 0, 1);
  ASSERT_TRUE(trainer.Join().ok());
  std::string parameters = "w:1";
  for (int i = 0; i < 12'000; ++i) parameters += ",parameter" + std::to_string(i) + ":1";
  const Reply reply = trainer.Do("register parameters=" + parameters);
  ASSERT_TRUE(reply.ok()) << reply;
  EXPECT_TRUE(trainer.Do("step times=2").ok());
}

// 128 KB on the wire would be 128 MiB in the daemon.
TEST(CompressedMessage, IsRefusedBeforeItGrows) {
  TestDaemon daemon;
  const std::uint64_t before = MemoryBytes(daemon.pid(), "VmHWM");
  const auto stub = v1::GradientSync::NewStub(
      grpc::CreateChannel("unix:" + daemon.socket(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  const auto stream = stub->Session(&context);
  v1::SessionRequest request;
  request.mutable_open_session()->set_job_id(std::string(128 << 20, 'x'));
  stream->Write(request);
  v1::SessionResponse response;
  while (stream->Read(&response)) {
    EXPECT_FALSE(response.has_session_opened());
  }
  EXPECT_FALSE(stream->Finish().ok());
  EXPECT_LT(MemoryBytes(daemon.pid(), "VmHWM"), before + (std::uint64_t{32} << 20));
  ExpectServesOn(daemon);
}

TEST(GarbageInOwnMemory, HarmsNoOtherSession) {
  TestDaemon daemon;
  Trainer good(daemon, 1, 2);
  good.Send(good.join());
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 2, "job").has_value());
  ASSERT_TRUE(good.Receive().ok());
  good.Begin("register buckets=2 count=10000");
  const auto layout = rank.JoinLayout(RawSession::LayoutRequest(2, 10'000), daemon.side_socket());
  ASSERT_TRUE(layout.has_value());
  ASSERT_TRUE(good.Result().ok());
  std::mt19937 random(3);
  const auto scribble = [&random](const std::shared_ptr<RawMemory>& memory) {
    for (std::size_t i = 0; i < memory->size(); ++i) {
      memory->data()[i] = static_cast<char>(random());
    }
  };
  for (std::uint64_t step = 1; step <= 20; ++step) {
    scribble(layout->arena);
    scribble(rank.semaphores());
    good.Begin("step");
    ASSERT_TRUE(rank.Ready(layout->channel, step, {0, 1}));
    scribble(rank.semaphores());
    scribble(layout->arena);
    ASSERT_TRUE(rank.EndStep(layout->channel, step));
    const auto done = rank.Await(v1::SessionResponse::kStepDone);
    ASSERT_TRUE(done.has_value());
    // The daemon's verdict does not depend on the semaphore words.
    EXPECT_EQ(done->step_done().verdict(), v1::VERDICT_COMPLETE);
    EXPECT_EQ(done->step_done().step(), step);
    // The sum of garbage is garbage, but the good rank's step ends too.
    EXPECT_EQ(good.Result().code, "WRONG");
  }
  ExpectServesOn(daemon);
}

TEST(SilentReader, IsDisconnectedAndTheDaemonStaysSmall) {
  TestDaemon daemon;
  const std::uint64_t before = MemoryBytes(daemon.pid(), "VmHWM");
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 1, "job").has_value());
  v1::SessionRequest query;
  query.mutable_query_step()->set_channel(1);
  query.mutable_query_step()->set_step(1);
  int sent = 0;
  while (sent < 300'000 && rank.Send(query)) ++sent;
  EXPECT_LT(sent, 300'000) << "the daemon must stop a client that reads no answers";
  EXPECT_LT(MemoryBytes(daemon.pid(), "VmHWM") - before, 100u << 20);
  EXPECT_NE(rank.End().code, 0);
  EXPECT_TRUE(daemon.AwaitStatus(NothingHeld));
  EXPECT_THAT(daemon.Log(), testing::HasSubstr("it left 16384 messages unread"));
  ExpectServesOn(daemon);
}

TEST(SilentReader, IsDisconnectedForUnreadBytesByName) {
  // Each StepDone holds a quarter of a megabyte, so the limit in bytes is reached before the limit
  // in messages.
  constexpr std::size_t kBuckets = 4096;
  constexpr std::uint64_t kSteps = 400;
  // AddressSanitizer keeps freed memory, 256 MiB of it if nobody says otherwise.
  const char* const options = std::getenv("ASAN_OPTIONS");
  TestDaemon daemon({}, {std::string("ASAN_OPTIONS=") + (options != nullptr ? options : "") +
                         ":quarantine_size_mb=16"});
  const std::uint64_t before = MemoryBytes(daemon.pid(), "VmHWM");
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 1, "job").has_value());
  const auto layout = rank.JoinLayout(RawSession::LayoutRequest(kBuckets, 1), daemon.side_socket());
  ASSERT_TRUE(layout.has_value());
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    if (!rank.EndStep(layout->channel, step, /*ready_rest=*/true)) break;
  }
  EXPECT_TRUE(daemon.AwaitStatus(NothingHeld))
      << "the session ends although the client reads nothing";
  EXPECT_LT(MemoryBytes(daemon.pid(), "VmHWM") - before, (kScale == 1 ? 160u : 300u) << 20);
  EXPECT_NE(rank.End().code, 0);
  EXPECT_THAT(daemon.Log(), testing::HasSubstr("67108864 bytes are allowed"));
  ExpectServesOn(daemon);
}

TEST(SilentReader, DoesNotDelayOtherRanks) {
  // Rank 0 never reads. Rank 1's steps continue as long as rank 0 takes part.
  TestDaemon daemon;
  Trainer good(daemon, 1, 2);
  good.Send(good.join());
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 2, "job").has_value());
  ASSERT_TRUE(good.Receive().ok());
  good.Begin("register buckets=1 count=10");
  const auto layout = rank.JoinLayout(RawSession::LayoutRequest(1, 10), daemon.side_socket());
  ASSERT_TRUE(layout.has_value());
  ASSERT_TRUE(good.Result().ok());
  for (std::uint64_t step = 1; step <= 200; ++step) {
    ASSERT_TRUE(rank.Ready(layout->channel, step, {0}));
    ASSERT_TRUE(rank.EndStep(layout->channel, step));
    const Reply reply = good.Do("step");
    ASSERT_EQ(reply.code, "WRONG") << "zeros were added, but the step is complete: " << reply;
  }
}

TEST(FailingRequests, EndOnlyTheirOwnSession) {
  TestDaemon daemon;
  for (int i = 0; i < 30; ++i) {
    RawSession rank(daemon.socket());
    ASSERT_TRUE(rank.Open(0, 1, "flood").has_value());
    for (int j = 0; j < 200; ++j) {
      if (!rank.Ready(99, 1, std::vector<std::uint32_t>(10, 7))) break;
    }
    rank.Cancel();
  }
  EXPECT_TRUE(daemon.AwaitStatus(NothingHeld));
  // The size of the log is limited.
  EXPECT_LT(daemon.Log().size(), 64u << 10);
  ExpectServesOn(daemon);
}

TEST(ConnectionFlood, DoesNotStopTheDaemon) {
  TestDaemon daemon;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, daemon.socket().c_str(), daemon.socket().size() + 1);
  std::vector<Descriptor> open;
  for (int i = 0; i < 900; ++i) {
    open.emplace_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (open.back().get() < 0) {
      open.pop_back();
      break;
    }
    EXPECT_EQ(connect(open.back().get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
              0);
  }
  EXPECT_GT(open.size(), 100u);
  open.clear();
  ExpectServesOn(daemon);
}

// ---- Quotas. Each error names its option.

void ExpectQuota(const Reply& reply, const std::string& option) {
  EXPECT_EQ(reply.code, "RESOURCE_EXHAUSTED") << reply;
  EXPECT_EQ(reply.reason, "QUOTA") << reply;
  EXPECT_NE(reply.message.find(option), std::string::npos) << reply;
}

TEST(SessionQuota, NamesItsOptionAndIsReleasedWhenASessionEnds) {
  TestDaemon daemon({"--quota_sessions_per_user=2"});
  auto trainers = JoinedTrainers(daemon, 2);
  Trainer third(daemon, 0, 1, "other");
  ExpectQuota(third.Join(), "quota_sessions_per_user");
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step");
  ExpectAll(trainers, "leave");
  ASSERT_TRUE(daemon.AwaitStatus(NothingHeld));
  EXPECT_TRUE(third.Join().ok());
}

TEST(JobQuota, NamesItsOption) {
  TestDaemon daemon({"--quota_jobs_per_user=1"});
  Trainer first(daemon, 0, 1, "first");
  ASSERT_TRUE(first.Join().ok());
  Trainer second(daemon, 0, 1, "second");
  ExpectQuota(second.Join(), "quota_jobs_per_user");
  EXPECT_TRUE(first.Do("barrier").ok());
}

TEST(ArenaQuota, NamesItsOptionAndTheSessionSurvives) {
  TestDaemon daemon({"--quota_arena_bytes_per_user=4MiB", "--staging_bytes=1MiB"});
  Trainer trainer(daemon, 0, 1);
  ASSERT_TRUE(trainer.Join().ok());
  ExpectQuota(trainer.Do("register layout=large buckets=4 count=1000000"),
              "quota_arena_bytes_per_user");
  EXPECT_TRUE(trainer.Do("register layout=small").ok());
  EXPECT_TRUE(trainer.Do("step layout=small").ok());
}

TEST(ArenaQuota, ExceededByOneRankIsReportedToTheOthersAtOnce) {
  TestDaemon daemon({"--quota_arena_bytes_per_user=7MiB", "--staging_bytes=1MiB"});
  const auto trainers = JoinedTrainers(daemon, 2);
  // The quota has room for one arena, not for both. The other rank's timeout is minutes away.
  int refused = 0;
  for (const Reply& reply : DoAll(trainers, "register buckets=1 count=1000000")) {
    EXPECT_EQ(reply.code, "RESOURCE_EXHAUSTED") << reply;
    EXPECT_NE(reply.message.find("quota_arena_bytes_per_user"), std::string::npos) << reply;
    if (reply.reason == "QUOTA") {
      ++refused;
    } else {
      EXPECT_EQ(reply.reason, "LAYOUT_REFUSED") << reply;
    }
  }
  EXPECT_GE(refused, 1);
  ExpectAll(trainers, "barrier");
}

// The plan of a layout takes memory while it is sent. The layouts below become smaller: the first
// ones do not fit, the next ones fit without their answers.
TEST(ControlQuota, RefusesALayoutWhosePlanCannotBeSentAndTheSessionSurvives) {
  TestDaemon daemon({"--quota_control_bytes_per_user=4MiB"});
  Trainer trainer(daemon, 0, 1);
  ASSERT_TRUE(trainer.Join().ok());
  int unsent_plans = 0;
  for (int buckets = 4096; buckets > 0; buckets -= 64) {
    const Reply reply =
        trainer.Do(absl::StrCat("register layout=a", buckets, " buckets=", buckets, " count=1"));
    if (reply.ok()) break;
    ExpectQuota(reply, "quota_control_bytes_per_user");
    if (reply.message.find("cannot be sent the plan") != std::string::npos) ++unsent_plans;
  }
  EXPECT_GT(unsent_plans, 0);
  EXPECT_TRUE(trainer.Do("barrier").ok());
  EXPECT_TRUE(trainer.Do("register layout=small").ok());
  EXPECT_TRUE(trainer.Do("step layout=small").ok());
}

TEST(LayoutQuota, NamesItsOption) {
  TestDaemon daemon({"--quota_layouts_per_session=2"});
  Trainer trainer(daemon, 0, 1);
  ASSERT_TRUE(trainer.Join().ok());
  ASSERT_TRUE(trainer.Do("register layout=a").ok());
  ASSERT_TRUE(trainer.Do("register layout=b").ok());
  ExpectQuota(trainer.Do("register layout=c"), "quota_layouts_per_session");
  EXPECT_TRUE(trainer.Do("step layout=b").ok());
}

TEST(BucketAndParameterQuotas, NameTheirOptions) {
  TestDaemon daemon({"--quota_buckets_per_layout=3", "--quota_parameters_per_layout=4"});
  Trainer trainer(daemon, 0, 1);
  ASSERT_TRUE(trainer.Join().ok());
  ExpectQuota(trainer.Do("register layout=a buckets=4"), "quota_buckets_per_layout");
  ExpectQuota(trainer.Do("register layout=b parameters=a:1,b:1,c:1,d:1,e:1"),
              "quota_parameters_per_layout");
  EXPECT_TRUE(trainer.Do("register layout=c buckets=3").ok());
  EXPECT_TRUE(trainer.Do("step layout=c").ok());
}

}  // namespace
}  // namespace gradsync::fault
