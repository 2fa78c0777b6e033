#include "daemon/session/session.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "tests/session/session_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kAborted = absl::StatusCode::kAborted;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

class SessionTest : public SessionFixture {
 protected:
  // A session alone in its job with a populated, mapped and ready layout of two pages.
  Session::Registration Ready(const Opened& opened) {
    Session::Registration registration = Register(opened, Layout(2048));
    Populate(registration.memory);
    EXPECT_TRUE(opened->ArenaMapped(registration.channel).ok());
    RunAll();
    EXPECT_EQ(opened.sink->Of<LayoutReadyMessage>().size(), 1u);
    return registration;
  }
};

// ---- Arenas

TEST_F(SessionTest, UnpopulatedArenaEndsTheSession) {
  const Opened careless = Open(0);
  const Opened other = Open(1);
  const auto registration = Register(careless, Layout(2048));
  Populate(*registration.memory.arena, 4096);
  ASSERT_TRUE(careless->ArenaMapped(registration.channel).ok());
  EXPECT_FALSE(careless.ended());  // the executor checks it
  RunAll();
  ExpectError(careless.end(), kPrecondition, "ARENA_NOT_POPULATED",
              {"rank 0 sent ArenaMapped for channel 1", "4096 of 8192 bytes"});
  ExpectError(other.end(), kAborted, "RANK_LOST",
              {"rank 0", "known because rank 0 sent ArenaMapped", "4096 of 8192 bytes"});
  // The daemon has not allocated the missing pages.
  struct stat file;
  ASSERT_EQ(fstat(registration.memory.arena->fd(), &file), 0);
  EXPECT_EQ(file.st_blocks * 512, 4096);
  EXPECT_EQ(registration.memory.arena->data(), nullptr);
}

// Otherwise the daemon would pay for pages that a trainer can keep after it has released the
// layout.
TEST_F(SessionTest, UnpopulatedSemaphoresEndTheSession) {
  const Opened careless = Open(0, 1);
  LayoutRequest request = Layout(1);
  request.spec.explicit_buckets.resize(100, {DataType::kFloat32, 1});
  const auto registration = Register(careless, request);
  Populate(*registration.memory.arena);
  Populate(registration.memory.semaphores->fd(), 4096);
  ASSERT_TRUE(careless->ArenaMapped(registration.channel).ok());
  RunAll();
  ExpectError(careless.end(), kPrecondition, "ARENA_NOT_POPULATED",
              {"rank 0 sent ArenaMapped for channel 1", "4096 of 8192 bytes"});
  // The daemon has not allocated the missing page.
  struct stat file;
  ASSERT_EQ(fstat(registration.memory.semaphores->fd(), &file), 0);
  EXPECT_EQ(file.st_blocks * 512, 4096);
}

TEST_F(SessionTest, PopulatedArenaIsMapped) {
  const Opened a = Open(0);
  const Opened b = Open(1);
  for (const Opened* opened : {&a, &b}) {
    const auto registration = Register(*opened, Layout(10));
    EXPECT_EQ(registration.memory.arena->bytes(), 4096u);
    EXPECT_EQ(registration.memory.semaphores->buckets(), 1u);
    Populate(registration.memory);
    ASSERT_TRUE((*opened)->ArenaMapped(registration.channel).ok());
    RunAll();
    EXPECT_NE(registration.memory.arena->data(), nullptr);
  }
  EXPECT_EQ(a.sink->Of<LayoutReadyMessage>().size(), 1u);
  EXPECT_EQ(b.sink->Of<LayoutReadyMessage>().size(), 1u);
}

TEST_F(SessionTest, SecondOrUnknownMappingIsRefused) {
  const Opened opened = Open(0);
  const auto registration = Register(opened, Layout(10));
  ExpectError(opened->ArenaMapped(registration.channel + 1), kPrecondition, "PROTOCOL_VIOLATION",
              {"channel 2", "not assigned"});
  ASSERT_TRUE(opened->ArenaMapped(registration.channel).ok());
  ExpectError(opened->ArenaMapped(registration.channel), kPrecondition, "PROTOCOL_VIOLATION",
              {"channel 1", "mapped already"});
}

TEST_F(SessionTest, JobRefusesAnUnknownChannel) {
  const Opened opened = Open(0, 1);
  EXPECT_EQ(DetailsOf(opened.job().MarkReady(opened->identity().session(), 5, 1, {0})).reason,
            "UNKNOWN_CHANNEL");
  EXPECT_EQ(DetailsOf(opened.job().EndStep(opened->identity().session(), 5, 1, "")).reason,
            "UNKNOWN_CHANNEL");
  EXPECT_EQ(DetailsOf(opened.job().FinishStep(opened->identity().session(), 5, 1, "")).reason,
            "UNKNOWN_CHANNEL");
}

TEST_F(SessionTest, MappingMayEndAfterLeave) {
  const Opened leaving = Open(0);
  const Opened other = Open(1);
  const auto registration = Register(leaving, Layout(10));
  Populate(registration.memory);
  ASSERT_TRUE(leaving->ArenaMapped(registration.channel).ok());
  ASSERT_TRUE(leaving.job().Leave(leaving->identity().session(), /*exit=*/false).ok());
  RunAll();
  EXPECT_FALSE(leaving.ended());
  EXPECT_FALSE(other.ended());
}

TEST_F(SessionTest, MappingAfterTheSessionsEndChangesNothing) {
  const Opened opened = Open(0, 1);
  const auto registration = Register(opened, Layout(10));
  ASSERT_TRUE(opened->ArenaMapped(registration.channel).ok());  // not populated
  opened->End(MakeError(kAborted, reason::kProcessEnded, "killed by the test"));
  RunAll();
  ExpectError(opened.end(), kAborted, "PROCESS_ENDED", {"killed by the test"});
}

// ---- Turns

// A turn maps or unmaps one page.
class TurnsTest : public SessionFixture {
 protected:
  static constexpr std::size_t kPageBytes = 4096;

  TurnsTest() : SessionFixture(OnePagePerTurn()) {}
  static SessionPolicy OnePagePerTurn() {
    SessionPolicy policy = Policy();
    policy.turn_bytes = kPageBytes;
    return policy;
  }
  // Registers a layout of one bucket with so many pages. Its arena is populated, and will be
  // mapped.
  Session::Registration BeginToMap(const Opened& opened, std::size_t pages) {
    Session::Registration registration =
        Register(opened, Layout(pages * kPageBytes / sizeof(float)));
    Populate(registration.memory);
    EXPECT_TRUE(opened->ArenaMapped(registration.channel).ok());
    return registration;
  }
};

TEST_F(TurnsTest, ArenaIsMappedInTurns) {
  const Opened opened = Open(0, 1);
  const auto registration = BeginToMap(opened, 3);
  int turns = 0;
  for (; executor_.pending() > 0; ++turns) {
    EXPECT_EQ(executor_.pending(), 1u);
    EXPECT_EQ(registration.memory.arena->data(), nullptr);
    EXPECT_TRUE(opened.sink->Of<LayoutReadyMessage>().empty());
    executor_.RunNext();
  }
  EXPECT_EQ(turns, 3);
  EXPECT_NE(registration.memory.arena->data(), nullptr);
  EXPECT_EQ(opened.sink->Of<LayoutReadyMessage>().size(), 1u);
}

TEST_F(TurnsTest, MappingEndsWithTheLayout) {
  const Opened opened = Open(0, 1);
  const std::weak_ptr<HostArena> arena = BeginToMap(opened, 3).memory.arena;
  executor_.RunNext();
  opened->End(MakeError(kAborted, reason::kProcessEnded, "killed by the test"));
  copier_.RunAll();
  EXPECT_TRUE(arena.expired());
  EXPECT_EQ(quota_.bytes_of(Tenant(kUser)), kStagingBytes);
  EXPECT_EQ(executor_.pending(), 1u);
  RunAll();
  ExpectError(opened.end(), kAborted, "PROCESS_ENDED", {"killed by the test"});
}

TEST_F(TurnsTest, ArenaIsUnmappedInTurnsAndCountsUntilTheLastOne) {
  const Opened opened = Open(0, 1);
  std::byte* data = nullptr;
  {
    const auto registration = BeginToMap(opened, 3);
    RunAll();
    data = registration.memory.arena->data();
    ASSERT_NE(data, nullptr);
    ASSERT_TRUE(
        opened.job().ReleaseLayout(opened->identity().session(), registration.channel).ok());
  }
  std::vector<int> mapped{3};  // pages, as they become fewer
  while (copier_.pending() > 0) {
    EXPECT_GT(quota_.bytes_of(Tenant(kUser)), kStagingBytes);
    copier_.RunNext();
    int pages = 0;
    for (std::size_t page = 0; page < 3; ++page) {
      if (msync(data + page * kPageBytes, kPageBytes, MS_ASYNC) == 0) ++pages;
    }
    if (pages != mapped.back()) mapped.push_back(pages);
  }
  EXPECT_EQ(mapped, (std::vector<int>{3, 2, 1, 0}));
  EXPECT_EQ(quota_.bytes_of(Tenant(kUser)), kStagingBytes);
}

TEST_F(TurnsTest, RegistrationWithoutRoomWaitsForTheLastTurn) {
  const Opened opened = Open(0, 1);
  constexpr std::size_t kPages = kQuotaBytes / 4 * 3 / kPageBytes;
  const std::uint32_t channel = BeginToMap(opened, kPages).channel;
  RunAll();
  ASSERT_TRUE(opened.job().ReleaseLayout(opened->identity().session(), channel).ok());
  Register(opened, Layout(kPages * kPageBytes / sizeof(float)));
}

// ---- Quotas

TEST_F(SessionTest, FailedLayoutsDoNotCount) {
  const Opened opened = Open(0);
  Register(opened, Layout(10, "first"));
  ASSERT_FALSE(RegisterNow(opened, Layout(20, "first")).ok());
  const Opened other = Open(1);
  const auto failed = Register(opened, Layout(10, "second"));
  ASSERT_FALSE(RegisterNow(other, Layout(20, "second")).ok());
  RunAll();
  // The agreement failed after this call.
  EXPECT_TRUE(opened->ArenaMapped(failed.channel).ok());
  Register(opened, Layout(10, "second"));
  ExpectError(RegisterNow(opened, Layout(10, "third")).status(), kExhausted, "QUOTA",
              {"2 layouts", "quota_layouts_per_session"});
  EXPECT_FALSE(opened.ended());
}

TEST_F(SessionTest, LayoutBeyondTheArenaQuotaFailsOnEveryRank) {
  const Opened a = Open(0);
  const Opened b = Open(1);
  const std::uint64_t held = quota_.bytes_of(Tenant(kUser));
  // Fits once, but not twice.
  const LayoutRequest large = Layout(kQuotaBytes / 4 * 3 / sizeof(float));
  Register(a, large);
  const absl::Status refused = RegisterNow(b, large).status();
  EXPECT_EQ(refused.code(), kExhausted) << refused;
  const auto failed = a.sink->Of<LayoutFailedMessage>();
  ASSERT_EQ(failed.size(), 1u);
  ExpectError(failed[0].status, kExhausted, "LAYOUT_REFUSED",
              {"'model'", "rank 1", "quota_arena_bytes_per_user"});
  EXPECT_FALSE(a.ended());
  EXPECT_FALSE(b.ended());
  // b's memory does not count; a's counts until its session ends.
  End(b);
  RunAll();
  EXPECT_GT(quota_.bytes_of(Tenant(kUser)), held - kStagingBytes);
  End(a);
}

TEST_F(SessionTest, MemoryCountsUntilItIsFreed) {
  const Opened opened = Open(0);
  EXPECT_EQ(opened->memory_bytes(), kStagingBytes);
  EXPECT_EQ(quota_.bytes_of(Tenant(kUser)), kStagingBytes);
  Register(opened, Layout(2048));
  EXPECT_EQ(opened->memory_bytes(), kStagingBytes + 8192);
  // The semaphores and the job's data of each bucket count too.
  EXPECT_GT(quota_.bytes_of(Tenant(kUser)), kStagingBytes + 8192);
}

TEST_F(SessionTest, ReplacedLayoutFreesItsMemory) {
  const Opened opened = Open(0, 1);
  std::uint32_t channel = Ready(opened).channel;
  const std::uint64_t held = quota_.bytes_of(Tenant(kUser));
  opened.sink->Take();
  for (int i = 0; i < 1000; ++i) {
    LayoutRequest request = Layout(2048);
    request.replaces = channel;
    const auto next = Register(opened, request);
    Populate(next.memory);
    ASSERT_TRUE(opened->ArenaMapped(next.channel).ok());
    RunAll();
    ASSERT_EQ(opened.sink->Take().size(), 1u);
    ASSERT_EQ(quota_.bytes_of(Tenant(kUser)), held);
    ASSERT_EQ(opened->memory_bytes(), kStagingBytes + 8192);
    channel = next.channel;
  }
  // Only layouts that have not ended count.
  Register(opened, Layout(10, "second"));
  ExpectError(RegisterNow(opened, Layout(10, "third")).status(), kExhausted, "QUOTA", {});
}

TEST_F(SessionTest, ReleasedLayoutGivesBackItsPlaceItsMemoryAndItsName) {
  const Opened opened = Open(0, 1);
  Register(opened, Layout(10, "another"));
  const std::uint64_t held = quota_.bytes_of(Tenant(kUser));
  // More than half of what is left: a second one fits only when the first is freed.
  const LayoutRequest large = Layout(kQuotaBytes / 4 * 3 / sizeof(float));
  for (int i = 0; i < 100; ++i) {
    const auto registration = Register(opened, large);
    Populate(registration.memory);
    ASSERT_TRUE(opened->ArenaMapped(registration.channel).ok());
    RunAll();
    ASSERT_EQ(opened.sink->Take().size(), 1u);
    // The next registration comes before the copier has freed anything.
    ASSERT_TRUE(
        opened.job().ReleaseLayout(opened->identity().session(), registration.channel).ok());
    ASSERT_GT(quota_.bytes_of(Tenant(kUser)), kQuotaBytes / 2);
  }
  RunAll();
  EXPECT_EQ(quota_.bytes_of(Tenant(kUser)), held);
  EXPECT_EQ(opened.job().Snapshot().layouts.size(), 1u);
}

TEST_F(SessionTest, RegistrationWithoutRoomWaitsForSessionsThatHaveEnded) {
  const Opened ended = Open(0, 1, Client(), "before");
  const Opened opened = Open(0, 1);
  const LayoutRequest large = Layout(kQuotaBytes / 4 * 3 / sizeof(float));
  Register(ended, large);
  End(ended);
  Register(opened, large);
}

TEST_F(SessionTest, OneLayoutTooManyFailsTheRegistrationOnEveryRank) {
  const Opened full = Open(0);
  const Opened other = Open(1);
  const auto agree = [&](const std::string& name) {
    for (const Opened* opened : {&full, &other}) Register(*opened, Layout(10, name));
  };
  agree("first");
  agree("second");
  const LayoutRequest third = Layout(10, "third");
  ExpectError(RegisterNow(full, third).status(), kExhausted, "QUOTA",
              {"2 layouts", "quota_layouts_per_session", "release some"});
  EXPECT_EQ(full.job().Snapshot().layouts.size(), 2u);
}

// ---- Staging

TEST_F(SessionTest, StagingMemoryMustBePopulated) {
  const Opened opened = Open(0);
  Populate(*opened->staging(), 4096);
  ExpectError(opened->Staging().status(), kPrecondition, "ARENA_NOT_POPULATED",
              {"rank 0", "staging memory", absl::StrCat("4096 of ", kStagingBytes, " bytes")});
}

// The daemon would allocate the missing page when an operation uses it, wherever it lies.
TEST_F(SessionTest, StagingMemoryWithAHoleAnywhereIsRefused) {
  constexpr std::uint64_t kPageBytes = 4096;
  for (std::uint64_t hole = 0; hole < kStagingBytes; hole += kPageBytes) {
    const Opened opened = Open(0, 1, Client(), absl::StrCat("run", hole));
    const int memfd = opened->staging()->fd();
    void* const mapped = mmap(nullptr, kStagingBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    std::memset(mapped, 1, kStagingBytes);
    munmap(mapped, kStagingBytes);
    ASSERT_EQ(fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(hole),
                        static_cast<off_t>(kPageBytes)),
              0);
    ASSERT_EQ(fcntl(memfd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
    ExpectError(opened->Staging().status(), kPrecondition, "ARENA_NOT_POPULATED",
                {"rank 0", "staging memory", absl::StrCat("4096 of ", kStagingBytes, " bytes")});
  }
}

TEST_F(SessionTest, StagingMemoryIsMappedOnce) {
  const Opened opened = Open(0);
  Populate(*opened->staging());
  const auto first = opened->Staging();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->bytes, kStagingBytes);
  const auto second = opened->Staging();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->data, first->data);
}

// ---- Lease

class LeaseTest : public SessionTest {
 protected:
  // Moves the clock and ticks.
  void Wait(std::uint64_t seconds) {
    clock_.Advance(seconds * kSecondNs);
    sessions_.Tick();
  }
  static std::size_t Questions(const Opened& opened) {
    return opened.sink->Of<LeaseQuestionMessage>().size();
  }
};

TEST_F(LeaseTest, SilentProcessIsAskedOnceAfterAThirdOfTheLease) {
  const Opened opened = Open(0);
  Wait(9);
  EXPECT_EQ(Questions(opened), 0u);
  Wait(1);
  EXPECT_EQ(Questions(opened), 1u);
  EXPECT_TRUE(opened.sink->AllFlushed());
  Wait(10);
  Wait(9);
  EXPECT_EQ(Questions(opened), 1u);
  EXPECT_FALSE(opened.ended());
}

TEST_F(LeaseTest, AnsweringProcessIsAskedAgainAfterTheNextThird) {
  const Opened opened = Open(0);
  Wait(10);
  opened->Heard(clock_.NowNs());
  for (int i = 0; i < 100; ++i) {
    Wait(9);
    EXPECT_EQ(Questions(opened), static_cast<std::size_t>(1 + i));
    Wait(1);
    EXPECT_EQ(Questions(opened), static_cast<std::size_t>(2 + i));
    opened->Heard(clock_.NowNs());
  }
  EXPECT_FALSE(opened.ended());
}

TEST_F(LeaseTest, SilentProcessIsLostAfterItsLease) {
  const Opened stopped = Open(0);
  const Opened other = Open(1);
  Wait(10);
  other->Heard(clock_.NowNs());
  Wait(10);
  other->Heard(clock_.NowNs());
  Wait(9);
  EXPECT_FALSE(stopped.ended());
  Wait(1);
  ExpectError(stopped.end(), kAborted, "LEASE_EXPIRED", {"answered nothing for 30000 ms"});
  ExpectError(other.end(), kAborted, "RANK_LOST",
              {"rank 0", "known because its process answered nothing for 30000 ms"});
  EXPECT_EQ(sessions_.lost(), 0u);  // counted when its stream has ended
  End(stopped);
  EXPECT_EQ(sessions_.lost(), 1u);
}

TEST_F(LeaseTest, DaemonThatWasStoppedAsksFirst) {
  const Opened opened = Open(0);
  Wait(3600);
  EXPECT_FALSE(opened.ended());
  EXPECT_EQ(Questions(opened), 1u);
  opened->Heard(clock_.NowNs());
  Wait(9);
  EXPECT_FALSE(opened.ended());
}

TEST_F(LeaseTest, SessionThatLeftIsNotLost) {
  const Opened opened = Open(0);
  ASSERT_TRUE(opened.job().Leave(opened->identity().session(), /*exit=*/true).ok());
  Wait(10);
  Wait(20);
  EXPECT_TRUE(opened.end().ok());
  EXPECT_EQ(opened->job().StateOf(opened->identity().session()), RankState::kExited);
}

}  // namespace
}  // namespace gradsync::daemon
