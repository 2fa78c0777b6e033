#include "daemon/session/session_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "daemon/base/error.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/kit/forked_child.h"
#include "tests/session/session_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr uid_t kOverflowUid = 65534;

class SessionTableTest : public SessionFixture {
 protected:
  using SessionFixture::SessionFixture;

  Nonce Offer(const Opened& opened) {
    const auto nonce =
        sessions_.Offer(**opened.session, {{opened->staging(), opened->staging()->fd()}});
    EXPECT_TRUE(nonce.ok()) << nonce.status();
    return nonce.ok() ? *nonce : "";
  }
};

// ---- Nonces

TEST_F(SessionTableTest, NonceIsClaimedOnce) {
  const Opened opened = Open(0);
  const Nonce nonce = Offer(opened);
  EXPECT_EQ(nonce.size(), kNonceBytes);
  const auto claimed = sessions_.Claim(nonce, Client());
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  ASSERT_EQ(claimed->size(), 1u);
  EXPECT_EQ((*claimed)[0].fd, opened->staging()->fd());
  EXPECT_EQ((*claimed)[0].owner, opened->staging());
  ExpectError(sessions_.Claim(nonce, Client()).status(), absl::StatusCode::kNotFound, "",
              {"used or expired"});
}

TEST_F(SessionTableTest, NonceExpiresAfterAMinute) {
  const Opened opened = Open(0);
  const Nonce early = Offer(opened);
  const Nonce late = Offer(opened);
  clock_.Advance(60 * kSecondNs);
  EXPECT_TRUE(sessions_.Claim(early, Client()).ok());
  clock_.Advance(1);
  EXPECT_EQ(sessions_.Claim(late, Client()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SessionTableTest, NonceDoesNotKeepMemory) {
  const Opened opened = Open(0);
  auto memory = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = memory;
  const auto nonce = sessions_.Offer(**opened.session, {{memory, 0}});
  ASSERT_TRUE(nonce.ok());
  memory.reset();
  EXPECT_TRUE(watch.expired()) << "nobody may ever claim it";
  ExpectError(sessions_.Claim(*nonce, opened->identity().process).status(),
              absl::StatusCode::kNotFound, "", {"has been freed"});
}

// A session can be offered memory again and again, and each agreement may fail.
TEST_F(SessionTableTest, OffersOfFreedMemoryAreForgotten) {
  const Opened opened = Open(0);
  const Opened other = Open(1);
  const Nonce kept = Offer(other);
  for (int i = 0; i < 1000; ++i) {
    const auto memory = std::make_shared<int>();
    ASSERT_TRUE(sessions_.Offer(**opened.session, {{memory, 0}}).ok());
    EXPECT_LE(sessions_.offers(), 2u);
  }
  Offer(opened);
  EXPECT_EQ(sessions_.offers(), 2u);
  EXPECT_TRUE(sessions_.Claim(kept, Client()).ok());
}

TEST_F(SessionTableTest, ExpiredOffersAreForgotten) {
  const Opened opened = Open(0);
  for (int i = 0; i < 10; ++i) {
    Offer(opened);
    clock_.Advance(61 * kSecondNs);
  }
  EXPECT_EQ(sessions_.offers(), 1u);
  End(opened);
  EXPECT_EQ(sessions_.offers(), 0u);
}

TEST_F(SessionTableTest, NonceIsRefusedToAnotherProcessOrUser) {
  const Opened opened = Open(0);
  const Nonce nonce = Offer(opened);
  for (const ClientProcess& thief :
       {Client(kUser, kPid + 1), Client(kUser + 1, kPid), Client(0, 1)}) {
    ExpectError(sessions_.Claim(nonce, thief).status(), absl::StatusCode::kPermissionDenied, "",
                {"another process"});
  }
  EXPECT_TRUE(sessions_.Claim(nonce, Client()).ok());
}

TEST_F(SessionTableTest, UnknownNonceIsNotFound) {
  Offer(Open(0));
  for (const Nonce& nonce : {Nonce(), Nonce(kNonceBytes, '\0'), Nonce(1000, 'x')}) {
    EXPECT_EQ(sessions_.Claim(nonce, Client()).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(SessionTableTest, NoncesDiffer) {
  const Opened opened = Open(0);
  std::set<Nonce> nonces;
  for (int i = 0; i < 1000; ++i) nonces.insert(Offer(opened));
  EXPECT_EQ(nonces.size(), 1000u);
}

TEST_F(SessionTableTest, EndedSessionHasNoNonces) {
  const Opened a = Open(0);
  const Opened b = Open(1);
  const Nonce of_a = Offer(a), of_b = Offer(b);
  End(a);
  EXPECT_EQ(sessions_.Claim(of_a, Client()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(sessions_.Claim(of_b, Client()).ok());
  // The process may end while the stream's thread registers a layout.
  const auto late = sessions_.Offer(**a.session, {{a->staging(), a->staging()->fd()}});
  ExpectError(late.status(), absl::StatusCode::kAborted, "SESSION_ENDED", {"rank 0"});
}

// ---- Admission

TEST_F(SessionTableTest, OverflowUserIsRefused) {
  ExpectError(Open(0, 2, Client(kOverflowUid)).session.status(),
              absl::StatusCode::kPermissionDenied, "CREDENTIALS", {"65534", "allow_overflow_uid"});
  EXPECT_EQ(quota_.total_bytes(), 0u);
}

TEST_F(SessionTableTest, TokensSeparateJobsOfOneUser) {
  const Opened a = Open(0, 2, Client(), "run", "secret");
  const Opened b = Open(0, 2, Client(), "run", "another");
  const Opened c = Open(0, 2, Client(), "run");
  const Opened d = Open(1, 2, Client(), "run", "secret");
  for (const Opened* opened : {&a, &b, &c, &d}) {
    ASSERT_TRUE(opened->session.ok()) << opened->session.status();
  }
  EXPECT_EQ(&a->job(), &d->job());
  EXPECT_NE(&a->job(), &b->job());
  EXPECT_NE(&a->job(), &c->job());
  const std::string& hash = a.job().identity().token_hash;
  EXPECT_EQ(hash.size(), 32u);
  EXPECT_EQ(hash.find("secret"), std::string::npos);
}

class StrictTest : public SessionTableTest {
 protected:
  StrictTest() : SessionTableTest(Strict()) {}
  static SessionPolicy Strict() {
    SessionPolicy policy = Policy();
    policy.require_token = true;
    policy.allow_overflow_uid = true;
    return policy;
  }
};

TEST_F(StrictTest, MissingTokenIsRefused) {
  ExpectError(Open(0).session.status(), absl::StatusCode::kPermissionDenied, "CREDENTIALS",
              {"token", "GRADSYNC_JOB_TOKEN"});
  EXPECT_TRUE(Open(0, 2, Client(), "run", "secret").session.ok());
}

TEST_F(StrictTest, OverflowUserIsAdmittedIfAllowed) {
  EXPECT_TRUE(Open(0, 2, Client(kOverflowUid), "run", "secret").session.ok());
}

// ---- Quotas

TEST_F(SessionTableTest, QuotaOfSessionsIsGivenBack) {
  std::vector<Opened> opened;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    opened.push_back(Open(rank, 4));
    ASSERT_TRUE(opened.back().session.ok());
  }
  ExpectError(Open(0, 1, Client(), "other").session.status(), absl::StatusCode::kResourceExhausted,
              "QUOTA", {"user 1000", "4 sessions", "quota_sessions_per_user"});
  EXPECT_TRUE(Open(0, 1, Client(kUser + 1)).session.ok());
  End(opened[0]);
  EXPECT_TRUE(Open(0, 1, Client(), "other").session.ok());
}

TEST_F(SessionTableTest, QuotasAreOfAPodOfAUser) {
  const auto in_pod = [](const char* id) {
    ClientProcess process = Client();
    process.place = {PodPlace::Kind::kPod, *PodId::Parse(id)};
    return process;
  };
  const ClientProcess greedy = in_pod("0a4d5e7c111142229333abcdefabcdef");
  const ClientProcess other = in_pod("6f1e0c4a93d24a578f0e1b2c3d4e5f60");
  std::vector<Opened> opened;
  for (std::uint32_t i = 0; i < 4; ++i) {
    // A token multiplies no quota.
    opened.push_back(Open(0, 2, greedy, "run", absl::StrCat("token", i)));
    ASSERT_TRUE(opened.back().session.ok()) << opened.back().session.status();
  }
  ExpectError(Open(0, 2, greedy, "run", "one more").session.status(),
              absl::StatusCode::kResourceExhausted, "QUOTA",
              {"user 1000 in pod 0a4d5e7c-1111-4222-9333-abcdefabcdef", "4 sessions"});
  const Opened mine = Open(0, 1, other);
  ASSERT_TRUE(mine.session.ok()) << mine.session.status();
  EXPECT_TRUE(Open(0, 1, Client(), "in no pod").session.ok());
  EXPECT_EQ(quota_.bytes_of(greedy.tenant()), 4 * kStagingBytes);
  EXPECT_EQ(quota_.bytes_of(other.tenant()), kStagingBytes);
  // The memory of a layout is charged in the same way.
  Register(mine, Layout(1 << 16));
  EXPECT_GT(quota_.bytes_of(other.tenant()), kStagingBytes + (1 << 18));
  EXPECT_EQ(quota_.bytes_of(greedy.tenant()), 4 * kStagingBytes);
  for (const Opened& one : opened) End(one);
  opened.clear();
  RunAll();
  EXPECT_EQ(quota_.bytes_of(greedy.tenant()), 0u);
}

TEST_F(SessionTableTest, WorldLargerThanTheQuotaIsRefused) {
  ExpectError(Open(0, 5).session.status(), absl::StatusCode::kResourceExhausted, "QUOTA",
              {"world_size 5", "quota_sessions_per_user", "4"});
}

TEST_F(SessionTableTest, RefusedSessionHoldsNothing) {
  const Opened held = Open(0);
  ASSERT_TRUE(held.session.ok());
  const std::uint64_t opened = sessions_.opened();
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(Open(0).session.status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(Open(1, 3).session.status().code(), absl::StatusCode::kFailedPrecondition);
  }
  RunAll();
  EXPECT_EQ(quota_.bytes_of(Tenant(kUser)), kStagingBytes);
  EXPECT_EQ(sessions_.Sessions().size(), 1u);
  EXPECT_EQ(sessions_.opened(), opened);
  EXPECT_TRUE(Open(1).session.ok());
  EXPECT_EQ(sessions_.opened(), opened + 1);
}

TEST_F(SessionTableTest, IncarnationsAreUnique) {
  std::set<std::uint64_t> incarnations;
  for (int i = 0; i < 10; ++i) {
    const Opened opened = Open(0, 1);
    ASSERT_TRUE(opened.session.ok());
    EXPECT_TRUE(incarnations.insert(opened->identity().incarnation).second);
    EXPECT_FALSE(Open(7, 1, Client(kOverflowUid)).session.ok());
    End(opened);
  }
}

class SmallQuotaTest : public SessionTableTest {
 protected:
  SmallQuotaTest() : SessionTableTest(LargeStaging()) {}
  static SessionPolicy LargeStaging() {
    SessionPolicy policy = Policy();
    policy.staging_bytes = kQuotaBytes / 4 * 3;
    return policy;
  }
};

TEST_F(SmallQuotaTest, StagingMemoryCountsTowardsTheArenaQuota) {
  ASSERT_TRUE(Open(0).session.ok());
  const Opened refused = Open(1);
  EXPECT_EQ(refused.session.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Open(1, 2, Client(kUser + 1)).session.ok());
}

// As in a job that another node coordinates: that node says when nothing touches the memory.
TEST_F(SessionTableTest, StagingMemoryThatAJobKeepsIsCharged) {
  Opened opened = Open(0, 1);
  Populate(*opened->staging());
  auto kept = opened->Staging();
  ASSERT_TRUE(kept.ok()) << kept.status();
  End(opened);
  opened.session = absl::UnknownError("no reference any more");
  RunAll();
  EXPECT_EQ(quota_.total_bytes(), kStagingBytes);
  kept = StagingMemory{};
  EXPECT_EQ(quota_.total_bytes(), 0u);
}

TEST_F(SessionTableTest, StepTimeoutDefaultsToTheDaemons) {
  ASSERT_TRUE(Open(0).session.ok());
  OpenRequest request;
  request.job_id = "run";
  request.rank = 1;
  request.world_size = 2;
  request.options.step_timeout_ns = sessions_.policy().step_timeout_ns + 1;
  const auto sink = std::make_shared<RecordingSink>();
  EXPECT_EQ(DetailsOf(OpenNow(Client(), request, sink).status()).reason, "JOB_MISMATCH");
  request.options.step_timeout_ns = sessions_.policy().step_timeout_ns;
  EXPECT_TRUE(OpenNow(Client(), request, sink).ok());
}

// ---- Ends

TEST_F(SessionTableTest, LossIsCountedOnce) {
  const Opened ended = Open(0);
  const Opened other = Open(1);
  End(ended);
  End(ended);
  EXPECT_EQ(sessions_.lost(), 1u);
  EXPECT_EQ(sessions_.Sessions().size(), 1u);
  ExpectError(other.end(), absl::StatusCode::kAborted, "RANK_LOST",
              {"rank 0", "known because its process (pid 4711) has ended"});
  // The end of the other session does not count as a loss.
  End(other);
  EXPECT_EQ(sessions_.lost(), 1u);
}

TEST_F(SessionTableTest, OrderlyExitIsNotALoss) {
  const Opened opened = Open(0);
  ASSERT_TRUE(opened.job().Leave(opened->identity().session(), /*exit=*/true).ok());
  End(opened);
  EXPECT_EQ(sessions_.lost(), 0u);
  EXPECT_TRUE(opened.end().ok());
}

// A trainer is lost after each of the things that it does before its first step.
TEST_F(SessionTableTest, LossDuringARegistrationHoldsNothing) {
  for (int done = 0; done <= 7; ++done) {
    std::vector<std::weak_ptr<HostArena>> arenas;
    {
      Opened ended = Open(0, 1);
      ASSERT_TRUE(ended.session.ok()) << ended.session.status();
      arenas.push_back(ended->staging());
      Session::Registration registration;
      const std::function<void()> steps[] = {
          [&] { Offer(ended); },
          [&] {
            registration = Register(ended, Layout(2048));
            arenas.push_back(registration.memory.arena);
          },
          [&] {
            ASSERT_TRUE(sessions_
                            .Offer(**ended.session,
                                   {{registration.memory.arena, registration.memory.arena->fd()}})
                            .ok());
          },
          [&] { Populate(registration.memory); },
          [&] { ASSERT_TRUE(ended->ArenaMapped(registration.channel).ok()); },
          [&] { RunAll(); },
          [&] {
            ASSERT_TRUE(ended.job()
                            .MarkReady(ended->identity().session(), registration.channel, 1, {0})
                            .ok());
          },
      };
      for (int i = 0; i < done; ++i) steps[i]();
      registration = {};
      End(ended);
    }
    const bool reducing = done == 7;
    EXPECT_EQ(reducer_.held().size(), reducing ? 1u : 0u);
    RunAll();
    if (reducing) {
      // Not freed while a reduction uses it.
      EXPECT_FALSE(arenas.back().expired());
      reducer_.CompleteAll();
      RunAll();
    }
    sessions_.Tick();
    for (const auto& arena : arenas) EXPECT_TRUE(arena.expired()) << done;
    EXPECT_EQ(quota_.total_bytes(), 0u) << done;
    EXPECT_TRUE(sessions_.Sessions().empty());
  }
}

TEST_F(SessionTableTest, ExecutorFreesTheMemory) {
  Opened opened = Open(0, 1);
  const std::weak_ptr<HostArena> staging = opened->staging();
  End(opened);
  opened.session = absl::UnknownError("no reference any more");
  EXPECT_FALSE(staging.expired());
  RunAll();
  EXPECT_TRUE(staging.expired());
}

TEST_F(SessionTableTest, DrainRefusesNewSessionsOnly) {
  const Opened opened = Open(0);
  EXPECT_FALSE(sessions_.draining());
  sessions_.Drain();
  EXPECT_TRUE(sessions_.draining());
  ExpectError(Open(1).session.status(), absl::StatusCode::kUnavailable, "DRAINING", {"drains"});
  EXPECT_FALSE(opened.ended());
  jobs_.EndAll(MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the daemon stops"));
  ExpectError(opened.end(), absl::StatusCode::kUnavailable, "DRAINING", {});
}

TEST_F(SessionTableTest, TimeOutSaysThatRanksOnOtherNodesCannotJoin) {
  for (const std::string coordinator : {"", "node-0"}) {
    OpenRequest request;
    request.job_id = "with '" + coordinator + "'";
    request.world_size = 2;
    request.coordinator = coordinator;
    auto sink = std::make_shared<RecordingSink>();
    const Opened opened{OpenNow(Client(), request, sink), sink};
    ASSERT_TRUE(opened.session.ok()) << opened.session.status();
    LayoutRequest layout = Layout(1);
    layout.deadline_ns = clock_.NowNs();
    Register(opened, layout);
    sessions_.Tick();
    const auto failed = sink->Of<LayoutFailedMessage>();
    ASSERT_EQ(failed.size(), 1u);
    const absl::Status& why = failed[0].status;
    ExpectError(why, absl::StatusCode::kDeadlineExceeded, "LAYOUT_TIMEOUT", {"rank 1"});
    EXPECT_EQ(absl::StrContains(why.message(), "has no peer_listen"), !coordinator.empty()) << why;
  }
}

TEST_F(SessionTableTest, TickChecksTheJobsDeadlines) {
  const Opened opened = Open(0);
  ASSERT_TRUE(
      opened.job().Operate(opened->identity().session(), 1, {}, {}, clock_.NowNs() + 5).ok());
  clock_.Advance(5);
  sessions_.Tick();
  EXPECT_EQ(opened.sink->Of<OperationFailedMessage>().size(), 1u);
}

// ---- Policy `hold`

// A job of two ranks that has completed a step. The pidfd of each process is a pipe.
class HeldSessionTest : public SessionTableTest {
 protected:
  HeldSessionTest() {
    request_.job_id = "run";
    request_.world_size = 2;
    request_.options.on_rank_loss = OnRankLoss::kHold;
    request_.options.step_timeout_ns = request_.options.hold_timeout_ns = 60 * kSecondNs;
  }
  // The session of a new process.
  Opened OpenHeld(std::uint32_t rank) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    ClientProcess process = Client();
    process.pidfd = std::make_shared<UniqueFd>(ends[0]);  // readable once something is written
    if (rank == 1 && process_of_1_.has_value()) process = *process_of_1_;
    request_.rank = rank;
    auto sink = std::make_shared<RecordingSink>();
    auto session = OpenNow(process, request_, sink);
    if (session.ok()) deaths_[rank] = UniqueFd(ends[1]);
    return Opened{std::move(session), std::move(sink)};
  }
  void Die(std::uint32_t rank) { ASSERT_EQ(write(deaths_[rank].get(), "x", 1), 1); }
  void Begin() {
    opened_ = {OpenHeld(0), OpenHeld(1)};
    std::vector<Session::Registration> layouts;
    for (const Opened& one : opened_) layouts.push_back(Register(one, Layout(1024)));
    for (const std::uint32_t rank : {0u, 1u}) {
      Populate(layouts[rank].memory);
      ASSERT_TRUE(opened_[rank]->ArenaMapped(layouts[rank].channel).ok());
    }
    RunAll();
    for (const Opened& one : opened_) {
      const RankSession session = one->identity().session();
      ASSERT_TRUE(one.job().FinishStep(session, layouts[0].channel, 1, "").ok());
    }
    reducer_.CompleteAll();
  }
  void Close(std::uint32_t rank) {
    sessions_.ConnectionClosed(
        *opened_[rank].session,
        MakeError(absl::StatusCode::kAborted, reason::kStreamEnded, "its connection was closed"));
  }
  static absl::Status Breach() {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kPositionMismatch,
                     "rank 1 is at another position");
  }
  std::string EndOf(std::uint32_t rank) { return DetailsOf(opened_[rank].end()).reason; }

  OpenRequest request_;
  UniqueFd deaths_[2];
  std::optional<ClientProcess> process_of_1_;  // instead of a pipe
  std::vector<Opened> opened_;
};

TEST_F(HeldSessionTest, DeadOneMakesRoomForTheNextOneAtOnce) {
  Begin();
  ExpectError(OpenHeld(1).session.status(), absl::StatusCode::kAlreadyExists, "RANK_OCCUPIED",
              {"only after its loss"});
  EXPECT_FALSE(opened_[1].ended());
  Die(1);
  const Opened next = OpenHeld(1);
  ASSERT_TRUE(next.session.ok()) << next.session.status();
  EXPECT_EQ(EndOf(1), "PROCESS_ENDED");
  EXPECT_FALSE(opened_[0].ended());
  EXPECT_EQ(next->identity().generation, 1u);
}

// The job has no other rank yet, so the next process may have other options.
TEST_F(HeldSessionTest, DeadOneOfAFormingJobMakesRoomForAnyOther) {
  opened_.push_back(OpenHeld(0));
  request_.options.on_rank_loss = OnRankLoss::kAbort;
  ExpectError(OpenHeld(0).session.status(), absl::StatusCode::kFailedPrecondition, "JOB_MISMATCH",
              {"on_rank_loss is abort"});
  Die(0);
  const Opened next = OpenHeld(0);
  ASSERT_TRUE(next.session.ok()) << next.session.status();
  EXPECT_EQ(EndOf(0), "PROCESS_ENDED");
}

// Also if it comes before the news of the loss.
TEST_F(HeldSessionTest, ReplacementWithAnotherTokenIsRefusedAndTheRankStaysHeld) {
  request_.token = "token of the job";
  Begin();
  request_.token = "another one";
  Die(1);
  ExpectError(OpenHeld(1).session.status(), absl::StatusCode::kPermissionDenied, "CREDENTIALS",
              {"rank 1 of job 'run' is lost", "another job token", "another job_id"});
  EXPECT_EQ(jobs_.Jobs().size(), 1u) << "it has begun no job of its own";
  EXPECT_FALSE(opened_[0].ended());
  request_.token = "token of the job";
  EXPECT_TRUE(OpenHeld(1).session.ok());
}

TEST_F(HeldSessionTest, AnotherTokenIsAnotherJobUnlessTheRankIsHeld) {
  request_.token = "token of the job";
  Begin();
  request_.token = "another one";
  const Opened other = OpenHeld(0);
  ASSERT_TRUE(other.session.ok()) << other.session.status();
  EXPECT_NE(&other.job(), &opened_[0].job());
  Die(1);
  OpenHeld(1);  // the other job is there, and waits for its rank 1
  EXPECT_EQ(jobs_.Jobs().size(), 2u);
}

// A killed process closes its connection a moment before the kernel reports its end.
TEST_F(HeldSessionTest, ClosedOneIsHeldWhenItsProcessHasEnded) {
  Begin();
  Close(1);
  sessions_.Tick();
  EXPECT_FALSE(opened_[1].ended());
  Die(1);
  sessions_.Tick();
  EXPECT_EQ(EndOf(1), "PROCESS_ENDED");
  EXPECT_FALSE(opened_[0].ended());
  EXPECT_EQ(sessions_.Sessions().size(), 1u);
  EXPECT_EQ(sessions_.lost(), 1u);
  EXPECT_TRUE(OpenHeld(1).session.ok());
}

ClientProcess ProcessOf(const ForkedChild& child) {
  ClientProcess process;
  process.uid = 1000;
  process.pid = child.pid();
  process.pidfd = std::make_shared<UniqueFd>(fcntl(child.pidfd(), F_DUPFD_CLOEXEC, 0));
  return process;
}

TEST_F(HeldSessionTest, ClosedOneWhoseProcessLivesIsKilledAfterItsLeaseAndThenHeld) {
  const ForkedChild sleeper;
  process_of_1_ = ProcessOf(sleeper);
  Begin();
  Close(1);
  clock_.Advance(sessions_.policy().lease_ns - 1);
  opened_[0]->Heard(clock_.NowNs());
  sessions_.Tick();
  EXPECT_FALSE(HasEnded(*process_of_1_, /*patience_ms=*/0));
  clock_.Advance(1);
  sessions_.Tick();
  EXPECT_TRUE(HasEnded(*process_of_1_, /*patience_ms=*/10'000));
  sessions_.Tick();
  EXPECT_EQ(EndOf(1), "PROCESS_ENDED");
  EXPECT_FALSE(opened_[0].ended());
  EXPECT_TRUE(OpenHeld(1).session.ok());
}

TEST_F(HeldSessionTest, ClosedOneThatCannotBeKilledEndsTheJobAfterItsLease) {
  Begin();  // a pipe is no process
  Close(1);
  clock_.Advance(sessions_.policy().lease_ns - 1);
  sessions_.Tick();
  EXPECT_FALSE(opened_[0].ended());
  clock_.Advance(1);
  sessions_.Tick();
  EXPECT_EQ(EndOf(0), "RANK_LOST");
  EXPECT_EQ(sessions_.Sessions().size(), 1u) << "the stream of rank 0 has not ended";
}

// No other rank would have the state.
TEST_F(HeldSessionTest, ClosedOneWhoseRankIsNotHeldIsNotKilled) {
  const ForkedChild sleeper;
  process_of_1_ = ProcessOf(sleeper);
  Begin();
  Die(0);
  Close(0);
  sessions_.Tick();
  Close(1);
  clock_.Advance(sessions_.policy().lease_ns);
  sessions_.Tick();
  EXPECT_TRUE(opened_[1].ended());
  EXPECT_FALSE(HasEnded(*process_of_1_, /*patience_ms=*/0));
}

TEST_F(HeldSessionTest, ClosedOneWhoseProcessHasAnotherSessionIsNotKilled) {
  const ForkedChild sleeper;
  process_of_1_ = ProcessOf(sleeper);
  Begin();
  request_.job_id = "another";
  const Opened another = OpenHeld(1);
  ASSERT_TRUE(another.session.ok()) << another.session.status();
  Close(1);
  clock_.Advance(sessions_.policy().lease_ns);
  opened_[0]->Heard(clock_.NowNs());
  another->Heard(clock_.NowNs());
  sessions_.Tick();
  EXPECT_EQ(EndOf(0), "RANK_LOST");
  EXPECT_FALSE(another.ended());
  EXPECT_FALSE(HasEnded(*process_of_1_, /*patience_ms=*/0));
}

TEST_F(HeldSessionTest, ClosedOneIsNotKilledIfNoOtherRankIsThere) {
  const ForkedChild sleeper;
  process_of_1_ = ProcessOf(sleeper);
  Begin();
  for (const std::uint32_t rank : {0u, 1u}) Close(rank);
  clock_.Advance(sessions_.policy().lease_ns);
  sessions_.Tick();
  for (const Opened& one : opened_) EXPECT_TRUE(one.ended());
  EXPECT_FALSE(HasEnded(*process_of_1_, /*patience_ms=*/0));
}

TEST_F(HeldSessionTest, SilentOneIsKilledAndThenHeld) {
  const ForkedChild sleeper;
  process_of_1_ = ProcessOf(sleeper);
  Begin();
  const std::uint64_t lease_ns = sessions_.policy().lease_ns;
  clock_.Advance(lease_ns / 3);
  sessions_.Tick();
  opened_[0]->Heard(clock_.NowNs());
  clock_.Advance(lease_ns - lease_ns / 3 - 1);
  sessions_.Tick();
  opened_[0]->Heard(clock_.NowNs());
  EXPECT_FALSE(HasEnded(*process_of_1_, /*patience_ms=*/0));
  clock_.Advance(1);
  sessions_.Tick();
  EXPECT_FALSE(opened_[1].ended()) << "not before its process has ended";
  EXPECT_TRUE(HasEnded(*process_of_1_, /*patience_ms=*/10'000));
  sessions_.Tick();
  EXPECT_EQ(EndOf(1), "PROCESS_ENDED");
  EXPECT_FALSE(opened_[0].ended());
  EXPECT_TRUE(OpenHeld(1).session.ok());
}

// A replacement breaks the protocol in its first step.
TEST_F(HeldSessionTest, ReplacementThatBreaksTheProtocolEndsAlone) {
  Begin();
  Die(1);
  opened_[1] = OpenHeld(1);
  sessions_.EndForBreach(*opened_[1].session, Breach());
  EXPECT_EQ(EndOf(1), "POSITION_MISMATCH") << "its client hears of it at once";
  EXPECT_TRUE(sessions_.IsClosed(**opened_[1].session));
  Close(1);  // its client ends the stream
  sessions_.Tick();
  EXPECT_EQ(opened_[0].job().StateOf(1), RankState::kHealing);
  Die(1);
  sessions_.Tick();
  EXPECT_EQ(opened_[0].job().StateOf(1), RankState::kHeld);
  EXPECT_FALSE(opened_[0].ended());
  EXPECT_TRUE(OpenHeld(1).session.ok());
}

TEST_F(HeldSessionTest, ReplacementThatLivesOnAfterABreachIsKilled) {
  Begin();
  Die(1);
  const ForkedChild sleeper;
  process_of_1_ = ProcessOf(sleeper);
  opened_[1] = OpenHeld(1);
  sessions_.EndForBreach(*opened_[1].session, Breach());
  clock_.Advance(sessions_.policy().lease_ns);
  opened_[0]->Heard(clock_.NowNs());
  sessions_.Tick();
  EXPECT_TRUE(HasEnded(*process_of_1_, /*patience_ms=*/10'000));
  sessions_.Tick();
  EXPECT_EQ(opened_[0].job().StateOf(1), RankState::kHeld);
  EXPECT_FALSE(opened_[0].ended());
}

TEST_F(HeldSessionTest, BreachOfALiveRankEndsTheJob) {
  Begin();
  sessions_.EndForBreach(*opened_[1].session, Breach());
  EXPECT_EQ(EndOf(0), "RANK_LOST");
}

TEST_F(HeldSessionTest, SilentOneThatCannotBeKilledEndsTheJob) {
  Begin();  // a pipe is no process
  const std::uint64_t lease_ns = sessions_.policy().lease_ns;
  clock_.Advance(lease_ns / 3);
  sessions_.Tick();
  opened_[0]->Heard(clock_.NowNs());
  clock_.Advance(lease_ns);
  sessions_.Tick();
  EXPECT_EQ(EndOf(1), "LEASE_EXPIRED");
  EXPECT_EQ(EndOf(0), "RANK_LOST");
}

TEST_F(HeldSessionTest, SilentOneThatHasLeftIsNotKilled) {
  const ForkedChild sleeper;
  process_of_1_ = ProcessOf(sleeper);
  Begin();
  ASSERT_TRUE(opened_[1].job().Leave(opened_[1]->identity().session(), /*exit=*/true).ok());
  for (int i = 0; i < 3; ++i) {
    clock_.Advance(sessions_.policy().lease_ns);
    opened_[0]->Heard(clock_.NowNs());
    sessions_.Tick();
  }
  EXPECT_TRUE(opened_[1].ended());
  EXPECT_FALSE(HasEnded(*process_of_1_, /*patience_ms=*/0));
}

TEST_F(HeldSessionTest, ClosedOneEndsAtOnceWhenTheDaemonDrains) {
  Begin();
  Close(1);
  sessions_.Drain();
  EXPECT_EQ(EndOf(0), "RANK_LOST");
}

TEST_F(HeldSessionTest, OneThatIsClosedWhileTheDaemonDrainsEndsAtOnce) {
  Begin();
  sessions_.Drain();
  Close(1);
  EXPECT_EQ(EndOf(0), "RANK_LOST");
}

TEST_F(HeldSessionTest, ProcessWhoseEndCannotBeKnownIsRefused) {
  ExpectError(OpenNow(Client(), request_, std::make_shared<RecordingSink>()).status(),
              absl::StatusCode::kUnimplemented, "LOSS_POLICY",
              {"rank 0", "when this process ends", "use abort"});
}

TEST_F(SessionTableTest, ClosedConnectionEndsASessionAtOnce) {
  const Opened opened = Open(0);
  sessions_.ConnectionClosed(
      *opened.session,
      MakeError(absl::StatusCode::kAborted, reason::kStreamEnded, "its connection was closed"));
  EXPECT_TRUE(sessions_.Sessions().empty());
}

}  // namespace
}  // namespace gradsync::daemon
