// Messages that break the rules of a step. The daemon refuses them from any client; the client
// library sends none of them: tests/client/steps_test.cc. Runs outside Bazel's sandbox: inside it
// root cannot become another user.

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/raw_session.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

constexpr int kInvalidArgument = 3;
constexpr int kFailedPrecondition = 9;
constexpr int kAborted = 10;

// Rank 0 breaks the rules. Rank 1 keeps them and learns of it.

struct Wrong {
  const char* name;
  // What rank 0 sends.
  std::function<void(RawSession*)> send;
  int code;
  const char* reason;
  // Part of the message to rank 0. The message to rank 1 quotes it after "known because".
  const char* says;
};

v1::SessionRequest RequestWith(const std::function<void(v1::SessionRequest*)>& fill) {
  v1::SessionRequest request;
  fill(&request);
  return request;
}

// Runs a step of both ranks, so that step 1 is decided.
void FinishFirstStep(RawSession* rank0, RawSession* rank1) {
  for (RawSession* rank : {rank0, rank1}) {
    ASSERT_TRUE(rank->Ready(1, 1, {0, 1}));
    ASSERT_TRUE(rank->EndStep(1, 1));
  }
  for (RawSession* rank : {rank0, rank1}) {
    const auto done = rank->Await(v1::SessionResponse::kStepDone);
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->step_done().verdict(), v1::VERDICT_COMPLETE);
  }
}

class WireRefusal : public testing::TestWithParam<Wrong> {};

TEST_P(WireRefusal, EndsTheSessionAndNamesTheBrokenRule) {
  TestDaemon daemon;
  RawSession rank0(daemon.socket()), rank1(daemon.socket());
  std::vector<std::shared_ptr<RawMemory>> arenas;
  std::uint32_t number = 0;
  for (RawSession* rank : {&rank0, &rank1}) {
    ASSERT_TRUE(rank->Open(number++, 2, "job").has_value());
    const auto assigned = rank->Register(RawSession::LayoutRequest(2, 1000));
    ASSERT_TRUE(assigned.has_value());
    arenas.push_back(rank->Map(*assigned, daemon.side_socket()));
    ASSERT_NE(arenas.back(), nullptr);
    ASSERT_TRUE(rank->Mapped(1));
  }
  for (RawSession* rank : {&rank0, &rank1}) {
    ASSERT_TRUE(rank->Await(v1::SessionResponse::kLayoutReady).has_value());
  }
  FinishFirstStep(&rank0, &rank1);
  GetParam().send(&rank0);
  const RawStatus end = rank0.End();
  EXPECT_EQ(end.code, GetParam().code) << end;
  EXPECT_EQ(end.reason, GetParam().reason) << end;
  EXPECT_NE(end.message.find(GetParam().says), std::string::npos) << end;
  const RawStatus other = rank1.End();
  EXPECT_EQ(other.code, kAborted) << other;
  EXPECT_EQ(other.reason, "RANK_LOST") << other;
  EXPECT_EQ(other.Field("rank"), "0") << other;
  EXPECT_NE(other.message.find(GetParam().says), std::string::npos) << other;
  // The daemon continues to serve.
  const auto trainers = JoinedTrainers(daemon, 2, "next");
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step");
}

const Wrong kWrongs[] = {
    {"OfASecondBucketReady",
     [](RawSession* rank) {
       rank->Ready(1, 2, {1});
       rank->Ready(1, 2, {1});
     },
     kFailedPrecondition, "ALREADY_READY", "step 2, bucket 1: marked ready a second time"},
    {"OfASecondBucketReadyInOneMessage",
     [](RawSession* rank) {
       rank->Ready(1, 2, {0, 0});
     },
     kFailedPrecondition, "ALREADY_READY", "step 2, bucket 0: marked ready a second time"},
    {"OfAnUnknownBucket", [](RawSession* rank) { rank->Ready(1, 2, {2}); }, kInvalidArgument,
     "UNKNOWN_BUCKET", "bucket 2: there is no such bucket; the layout has 2"},
    {"OfAHugeBucket", [](RawSession* rank) { rank->Ready(1, 2, {0xffffffffu}); }, kInvalidArgument,
     "UNKNOWN_BUCKET", "bucket 4294967295"},
    {"OfAStaleStep", [](RawSession* rank) { rank->Ready(1, 1, {0}); }, kFailedPrecondition,
     "STALE_STEP", "the next one is 2"},
    {"OfStepZero", [](RawSession* rank) { rank->Ready(1, 0, {0}); }, kFailedPrecondition,
     "STALE_STEP", "the next one is 2"},
    {"OfAStepAhead", [](RawSession* rank) { rank->Ready(1, 3, {0}); }, kFailedPrecondition,
     "PROTOCOL_VIOLATION", "ahead of step 2"},
    {"OfAStaleEndStep", [](RawSession* rank) { rank->EndStep(1, 1); }, kFailedPrecondition,
     "STALE_STEP", "the next one is 2"},
    {"OfAnEndStepBeforeEveryBucket",
     [](RawSession* rank) {
       rank->Ready(1, 2, {0});
       rank->EndStep(1, 2);
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "bucket 1: EndStep, but this bucket was not"},
    {"OfABucketAfterEndStep",
     [](RawSession* rank) {
       rank->Ready(1, 2, {0, 1});
       rank->EndStep(1, 2);
       rank->Ready(1, 2, {0});
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "after this rank had ended the step"},
    {"OfTheRestAfterEndStep",
     [](RawSession* rank) {
       rank->Ready(1, 2, {0, 1});
       rank->EndStep(1, 2);
       rank->EndStep(1, 2, /*ready_rest=*/true);
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "after this rank had ended the step"},
    {"OfTheRestASecondTime",
     [](RawSession* rank) {
       rank->EndStep(1, 2, /*ready_rest=*/true);
       rank->EndStep(1, 2, /*ready_rest=*/true);
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "after this rank had ended the step"},
    {"OfTheRestOfAStaleStep", [](RawSession* rank) { rank->EndStep(1, 1, /*ready_rest=*/true); },
     kFailedPrecondition, "STALE_STEP", "the next one is 2"},
    {"OfTheRestAhead", [](RawSession* rank) { rank->EndStep(1, 3, /*ready_rest=*/true); },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "ahead of step 2"},
    {"OfAnUnknownChannel", [](RawSession* rank) { rank->Ready(7, 1, {0}); }, kInvalidArgument,
     "UNKNOWN_CHANNEL", "no layout on channel 7"},
    {"OfAUsedMapOfAnotherSize",
     [](RawSession* rank) {
       rank->Ready(1, 2, {0, 1});
       rank->Send(RequestWith([](v1::SessionRequest* request) {
         request->mutable_end_step()->set_channel(1);
         request->mutable_end_step()->set_step(2);
         request->mutable_end_step()->set_used_map("too long");
       }));
     },
     kInvalidArgument, "MALFORMED", "used_map of 8 bytes"},
    {"OfASecondArenaMapped", [](RawSession* rank) { rank->Mapped(1); }, kFailedPrecondition,
     "PROTOCOL_VIOLATION", "ArenaMapped for channel 1"},
    {"OfASecondOpenSession",
     [](RawSession* rank) { rank->Send(RawSession::OpenRequest(0, 2, "job")); },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "OpenSession a second time"},
    {"OfAnEmptyMessage", [](RawSession* rank) { rank->Send({}); }, kInvalidArgument, "MALFORMED",
     "no kind that this daemon knows"},
    {"OfABroadcastFromNobody",
     [](RawSession* rank) {
       rank->Send(RequestWith([](v1::SessionRequest* request) {
         request->mutable_broadcast()->set_sequence(1);
         request->mutable_broadcast()->set_root(2);
       }));
     },
     kInvalidArgument, "UNKNOWN_RANK", "broadcast from rank 2 in a world of 2"},
    {"OfABroadcastWithoutPopulatedStaging",
     [](RawSession* rank) {
       rank->Send(RequestWith([](v1::SessionRequest* request) {
         request->mutable_broadcast()->set_sequence(1);
         request->mutable_broadcast()->set_bytes(4096);
       }));
     },
     kFailedPrecondition, "ARENA_NOT_POPULATED", "staging memory"},
    {"OfAnAllReduceBeyondStaging",
     [](RawSession* rank) {
       rank->Send(RequestWith([](v1::SessionRequest* request) {
         request->mutable_all_reduce()->set_sequence(1);
         request->mutable_all_reduce()->set_dtype(v1::DATA_TYPE_FLOAT64);
         request->mutable_all_reduce()->set_count(std::uint64_t{1} << 61);
       }));
     },
     kInvalidArgument, "MALFORMED", "does not fit the staging memory"},
    {"OfAnOperationOutOfSequence",
     [](RawSession* rank) {
       rank->Send(RequestWith(
           [](v1::SessionRequest* request) { request->mutable_barrier()->set_sequence(5); }));
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "the next one is 1"},
    {"OfALeaveInAStep",
     [](RawSession* rank) {
       rank->Ready(1, 2, {0});
       rank->Send(RequestWith(
           [](v1::SessionRequest* request) { request->mutable_leave()->set_exit(true); }));
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "Leave in the middle of a step"},
    {"OfTheReplacementOfAnUnknownLayout",
     [](RawSession* rank) {
       v1::SessionRequest request = RawSession::LayoutRequest(2, 1000);
       request.mutable_register_layout()->set_replaces(77);
       rank->Send(request);
     },
     kInvalidArgument, "UNKNOWN_CHANNEL", "no layout on channel 77"},
    {"OfTheReplacementOfALayoutInItsStep",
     [](RawSession* rank) {
       rank->Ready(1, 2, {1});
       v1::SessionRequest request = RawSession::LayoutRequest(2, 1000);
       request.mutable_register_layout()->set_replaces(1);
       rank->Send(request);
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "whose step 2 it is in"},
    {"OfAStepOfALayoutThatIsBeingReplaced",
     [](RawSession* rank) {
       v1::SessionRequest request = RawSession::LayoutRequest(2, 1000);
       request.mutable_register_layout()->set_replaces(1);
       rank->Send(request);
       rank->Ready(1, 2, {1});
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "is replacing layout 'default' on channel 1"},
    {"OfAnOperationOfARankThatIsAway",
     [](RawSession* rank) {
       rank->Send(RequestWith(
           [](v1::SessionRequest* request) { request->mutable_leave()->set_exit(false); }));
       rank->Send(RequestWith(
           [](v1::SessionRequest* request) { request->mutable_barrier()->set_sequence(1); }));
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "takes part in nothing until LeaveDone"},
    {"OfAStepOfARankThatIsAway",
     [](RawSession* rank) {
       rank->Send(RequestWith(
           [](v1::SessionRequest* request) { request->mutable_leave()->set_exit(false); }));
       rank->Ready(1, 2, {0});
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "has left: it takes part in no step"},
    {"OfASecondLeave",
     [](RawSession* rank) {
       for (int i = 0; i < 2; ++i) {
         rank->Send(RequestWith(
             [](v1::SessionRequest* request) { request->mutable_leave()->set_exit(false); }));
       }
     },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "sent Leave twice"},
};

INSTANTIATE_TEST_SUITE_P(Daemon, WireRefusal, testing::ValuesIn(kWrongs),
                         [](const auto& one) { return std::string(one.param.name); });

// ---- Refusals of the first message

struct WrongOpen {
  const char* name;
  std::function<void(v1::SessionRequest*)> spoil;
  int code;
  const char* reason;
  const char* says;
};

class OpenRefusal : public testing::TestWithParam<WrongOpen> {};

TEST_P(OpenRefusal, NamesTheFieldAndKeepsNoState) {
  TestDaemon daemon;
  RawSession rank(daemon.socket());
  v1::SessionRequest request = RawSession::OpenRequest(0, 2, "job");
  GetParam().spoil(&request);
  ASSERT_TRUE(rank.Send(request));
  const RawStatus end = rank.End();
  EXPECT_EQ(end.code, GetParam().code) << end;
  EXPECT_EQ(end.reason, GetParam().reason) << end;
  EXPECT_NE(end.message.find(GetParam().says), std::string::npos) << end;
  const auto status = daemon.Status();
  EXPECT_EQ(status.jobs_size(), 0);
  EXPECT_EQ(status.arena_bytes(), 0u);
}

const WrongOpen kWrongOpens[] = {
    {"OfAnotherProtocol",
     [](v1::SessionRequest* request) {
       request->mutable_open_session()->mutable_protocol()->set_oldest(100);
       request->mutable_open_session()->mutable_protocol()->set_newest(101);
     },
     kFailedPrecondition, "VERSION", "protocol 1.100 to 1.101"},
    {"OfAnotherSharedMemoryAbi",
     [](v1::SessionRequest* request) { request->mutable_open_session()->set_shared_memory_abi(9); },
     kFailedPrecondition, "VERSION", "shared-memory ABI 9"},
    {"OfAnEmptyJobId",
     [](v1::SessionRequest* request) { request->mutable_open_session()->set_job_id(""); },
     kInvalidArgument, "MALFORMED", "job_id has 0 bytes"},
    {"OfAJobIdWithControlCharacters",
     [](v1::SessionRequest* request) { request->mutable_open_session()->set_job_id("a\nb"); },
     kInvalidArgument, "MALFORMED", "not printable"},
    {"OfARankBeyondTheWorld",
     [](v1::SessionRequest* request) { request->mutable_open_session()->set_rank(2); },
     kInvalidArgument, "MALFORMED", "rank 2 in a world of 2"},
    {"OfAnEmptyWorld",
     [](v1::SessionRequest* request) { request->mutable_open_session()->set_world_size(0); },
     kInvalidArgument, "MALFORMED", "world_size 0"},
    {"OfAHugeWorld",
     [](v1::SessionRequest* request) {
       request->mutable_open_session()->set_world_size(0xffffffffu);
     },
     kInvalidArgument, "MALFORMED", "world_size 4294967295"},
    {"OfAnUnknownLossPolicy",
     [](v1::SessionRequest* request) {
       request->mutable_open_session()->mutable_options()->set_on_rank_loss(
           static_cast<v1::LossPolicy>(9));
     },
     kInvalidArgument, "MALFORMED", "on_rank_loss"},
    {"OfHold",
     [](v1::SessionRequest* request) {
       request->mutable_open_session()->mutable_options()->set_on_rank_loss(v1::LOSS_POLICY_HOLD);
     },
     kInvalidArgument, "MALFORMED", "state_source"},
    {"OfAnotherFirstMessage",
     [](v1::SessionRequest* request) { request->mutable_barrier()->set_sequence(1); },
     kFailedPrecondition, "PROTOCOL_VIOLATION", "the first message"},
    {"OfNothing", [](v1::SessionRequest* request) { request->Clear(); }, kFailedPrecondition,
     "PROTOCOL_VIOLATION", "the first message"},
};

INSTANTIATE_TEST_SUITE_P(Daemon, OpenRefusal, testing::ValuesIn(kWrongOpens),
                         [](const auto& one) { return std::string(one.param.name); });

// ---- Arenas

TEST(Arena, IsRefusedAtArenaMappedIfNotPopulated) {
  TestDaemon daemon;
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 1, "job").has_value());
  const auto assigned = rank.Register(RawSession::LayoutRequest(2, 100'000));
  ASSERT_TRUE(assigned.has_value());
  const auto arena = rank.Map(*assigned, daemon.side_socket(), /*populate=*/false);
  ASSERT_NE(arena, nullptr);
  arena->data()[0] = 1;  // one page of many
  ASSERT_TRUE(arena->Seal());
  ASSERT_TRUE(rank.Mapped(assigned->channel()));
  const RawStatus end = rank.End();
  EXPECT_EQ(end.code, kFailedPrecondition) << end;
  EXPECT_EQ(end.reason, "ARENA_NOT_POPULATED") << end;
  EXPECT_EQ(end.Field("rank"), "0") << end;
}

TEST(Arena, IsRefusedAtBucketReadyIfNotMapped) {
  TestDaemon daemon;
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 1, "job").has_value());
  const auto assigned = rank.Register(RawSession::LayoutRequest(2, 1000));
  ASSERT_TRUE(assigned.has_value());
  ASSERT_TRUE(rank.Ready(assigned->channel(), 1, {0}));
  const RawStatus end = rank.End();
  EXPECT_EQ(end.code, kFailedPrecondition) << end;
  EXPECT_EQ(end.reason, "ARENA_NOT_POPULATED") << end;
  EXPECT_NE(end.message.find("before LayoutReady"), std::string::npos) << end;
}

TEST(Arena, IsRefusedAtArenaMappedIfItHasAHoleAndTheOthersLearnIt) {
  TestDaemon daemon;
  Trainer good(daemon, 1, 2);
  good.Send(good.join());
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 2, "job").has_value());
  ASSERT_TRUE(good.Receive().ok());
  good.Begin("register buckets=2 count=100000");
  const auto assigned = rank.Register(RawSession::LayoutRequest(2, 100'000));
  ASSERT_TRUE(assigned.has_value());
  const auto arena = rank.Map(*assigned, daemon.side_socket(), /*populate=*/false);
  ASSERT_NE(arena, nullptr);
  std::memset(arena->data(), 1, arena->size() - 8192);
  ASSERT_TRUE(arena->Seal());
  ASSERT_TRUE(rank.Mapped(assigned->channel()));
  const RawStatus end = rank.End();
  EXPECT_EQ(end.code, kFailedPrecondition) << end;
  EXPECT_EQ(end.reason, "ARENA_NOT_POPULATED") << end;
  const Reply reply = good.Result();
  EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
  EXPECT_EQ(reply.Field("rank"), "0") << reply;
}

std::int64_t AllocatedBlocks(int fd) {
  struct stat file;
  EXPECT_EQ(fstat(fd, &file), 0);
  return file.st_blocks;
}

// Rank 0 marks its buckets and frees its pages before rank 1 marks. A reduction would allocate them
// at the daemon's expense: with enough ranks, until the daemon has no memory.
TEST(Arena, CannotLosePagesBetweenTheMarksOfTwoRanks) {
  TestDaemon daemon;
  attack::Neighbour neighbour(daemon);
  RawSession rank0(daemon.socket()), rank1(daemon.socket());
  ASSERT_TRUE(rank0.Open(0, 2, "job").has_value());
  ASSERT_TRUE(rank1.Open(1, 2, "job").has_value());
  std::vector<std::shared_ptr<RawMemory>> arenas;
  for (RawSession* const rank : {&rank0, &rank1}) {
    const auto assigned = rank->Register(RawSession::LayoutRequest(2, 100'000));
    ASSERT_TRUE(assigned.has_value());
    arenas.push_back(rank->Map(*assigned, daemon.side_socket()));
    ASSERT_NE(arenas.back(), nullptr);
    ASSERT_TRUE(rank->Mapped(assigned->channel()));
  }
  for (RawSession* const rank : {&rank0, &rank1}) {
    ASSERT_TRUE(rank->Await(v1::SessionResponse::kLayoutReady).has_value());
  }
  ASSERT_TRUE(rank0.Ready(1, 1, {0, 1}));
  const std::int64_t allocated = AllocatedBlocks(arenas[0]->fd());
  EXPECT_EQ(fallocate(arenas[0]->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                      static_cast<off_t>(arenas[0]->size())),
            -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(madvise(arenas[0]->data(), arenas[0]->size(), MADV_REMOVE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(AllocatedBlocks(arenas[0]->fd()), allocated);
  ASSERT_TRUE(rank1.Ready(1, 1, {0, 1}));
  for (RawSession* const rank : {&rank0, &rank1}) ASSERT_TRUE(rank->EndStep(1, 1));
  for (RawSession* const rank : {&rank0, &rank1}) {
    const auto done = rank->Await(v1::SessionResponse::kStepDone);
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->step_done().verdict(), v1::VERDICT_COMPLETE);
  }
  neighbour.ExpectUnharmed();
}

// ---- Staging memory

v1::SessionRequest AllReduceOfTheFirstPage() { return RawSession::AllReduceRequest(1024); }

// Opens a session of a job of one rank, and maps its staging memory. Null on failure.
std::unique_ptr<RawMemory> OpenAndMapStaging(const TestDaemon& daemon, const std::string& job,
                                             RawSession* rank) {
  const auto opened = rank->Open(0, 1, job);
  if (!opened.has_value()) return nullptr;
  return RawSession::MapStaging(*opened, daemon.side_socket());
}

int PunchHole(const RawMemory& memory, std::size_t at, std::size_t bytes) {
  return fallocate(memory.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                   static_cast<off_t>(bytes));
}

// The operation would use the first page alone. The daemon would allocate the others in later ones.
TEST(Staging, IsRefusedWhereverItHasAHole) {
  constexpr std::size_t kPageBytes = 4096, kBytes = std::size_t{4} << 20;
  const TestDaemon daemon({"--staging_bytes=4MiB"});
  attack::Neighbour neighbour(daemon);
  for (const std::size_t hole : {std::size_t{0}, kBytes / 2, kBytes - kPageBytes}) {
    RawSession rank(daemon.socket());
    const auto staging = OpenAndMapStaging(daemon, "job" + std::to_string(hole), &rank);
    ASSERT_NE(staging, nullptr);
    ASSERT_EQ(staging->size(), kBytes);
    std::memset(staging->data(), 1, kBytes);
    ASSERT_EQ(PunchHole(*staging, hole, kPageBytes), 0);
    ASSERT_TRUE(staging->Seal());
    const std::int64_t allocated = AllocatedBlocks(staging->fd());
    ASSERT_TRUE(rank.Send(AllReduceOfTheFirstPage()));
    const RawStatus end = rank.End();
    EXPECT_EQ(end.code, kFailedPrecondition) << "hole at " << hole << ": " << end;
    EXPECT_EQ(end.reason, "ARENA_NOT_POPULATED") << end;
    EXPECT_NE(end.message.find("staging memory"), std::string::npos) << end;
    EXPECT_EQ(AllocatedBlocks(staging->fd()), allocated) << "the daemon has allocated it";
  }
  neighbour.ExpectUnharmed();
}

TEST(Staging, CannotLosePagesOnceItIsInUse) {
  const TestDaemon daemon({"--staging_bytes=4MiB"});
  attack::Neighbour neighbour(daemon);
  RawSession rank(daemon.socket());
  const auto staging = OpenAndMapStaging(daemon, "job", &rank);
  ASSERT_NE(staging, nullptr);
  ASSERT_TRUE(staging->Populate());
  ASSERT_TRUE(rank.Send(AllReduceOfTheFirstPage()));
  ASSERT_TRUE(rank.Await(v1::SessionResponse::kOperationDone).has_value());
  const std::int64_t allocated = AllocatedBlocks(staging->fd());
  EXPECT_EQ(PunchHole(*staging, 0, staging->size()), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(madvise(staging->data(), staging->size(), MADV_REMOVE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(AllocatedBlocks(staging->fd()), allocated);
  neighbour.ExpectUnharmed();
}

TEST(Layout, IsRefusedIfMalformedAndTheSessionSurvives) {
  TestDaemon daemon;
  RawSession rank(daemon.socket());
  ASSERT_TRUE(rank.Open(0, 1, "job").has_value());
  const auto layout = [](const std::function<void(v1::RegisterLayout*)>& fill) {
    v1::SessionRequest request;
    request.mutable_register_layout()->set_request_id(7);
    request.mutable_register_layout()->set_name("layout");
    fill(request.mutable_register_layout());
    return request;
  };
  const auto parameter = [](v1::RegisterLayout* out, const std::string& name,
                            const std::vector<std::uint64_t>& shape, int dtype) {
    v1::Parameter* added = out->add_parameters();
    added->set_name(name);
    for (const std::uint64_t extent : shape) added->add_shape(extent);
    added->set_dtype(static_cast<v1::DataType>(dtype));
  };
  const struct {
    v1::SessionRequest request;
    const char* says;
  } kCases[] = {
      {layout([](v1::RegisterLayout*) {}), "either parameters or explicit_buckets"},
      {layout([&](v1::RegisterLayout* out) { out->set_name(""); }), "name has 0 bytes"},
      {layout([&](v1::RegisterLayout* out) { parameter(out, "", {1}, 1); }), "name has 0"},
      {layout([&](v1::RegisterLayout* out) {
         parameter(out, "w", {1}, 1);
         parameter(out, "w", {1}, 1);
       }),
       "'w' is given twice"},
      {layout([&](v1::RegisterLayout* out) { parameter(out, "w", {1}, 0); }), "dtype 0"},
      {layout([&](v1::RegisterLayout* out) { parameter(out, "w", {1}, 77); }), "dtype 77"},
      {layout([&](v1::RegisterLayout* out) {
         parameter(out, "w", {0xffffffffffffffffull, 0xffffffffffffffffull}, 1);
       }),
       "16 TiB"},
      {layout([&](v1::RegisterLayout* out) {
         parameter(out, "w", {std::uint64_t{1} << 32, std::uint64_t{1} << 32}, 1);
       }),
       "16 TiB"},
      {layout([&](v1::RegisterLayout* out) {
         parameter(out, "w", std::vector<std::uint64_t>(33, 1), 1);
       }),
       "33 dimensions"},
      {layout([&](v1::RegisterLayout* out) {
         parameter(out, "w", {1}, 1);
         out->set_op(static_cast<v1::ReduceOp>(9));
       }),
       "op 9"},
  };
  for (const auto& one : kCases) {
    ASSERT_TRUE(rank.Send(one.request));
    const auto failed = rank.Await(v1::SessionResponse::kOperationFailed);
    ASSERT_TRUE(failed.has_value()) << one.says;
    EXPECT_EQ(failed->operation_failed().sequence(), 7u);
    const RawStatus status = RawStatusOf(failed->operation_failed().status());
    EXPECT_EQ(status.code, kInvalidArgument) << status;
    EXPECT_EQ(status.reason, "MALFORMED") << status;
    EXPECT_NE(status.message.find(one.says), std::string::npos) << status;
  }
  EXPECT_TRUE(rank.Register(RawSession::LayoutRequest(2, 10)).has_value());
}

}  // namespace
}  // namespace gradsync::fault
