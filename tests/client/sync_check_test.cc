// Whether all ranks have the same state.

#include "client/src/sync_check.h"

#include <sys/mman.h>

#include <future>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

namespace gradsync {
namespace {

using client::SyncCheck;
using testing::HasSubstr;

std::string ListOf(const std::vector<std::string>& names, char digest) {
  std::vector<StateItem> items;
  for (const std::string& name : names) items.push_back({name, nullptr, 0});
  return SyncCheck::ListOf(items, {names.size(), std::string(32, digest)});
}

TEST(SyncCheckTest, TheFirstDifferenceCounts) {
  const std::string root = ListOf({"a", "b", "c"}, 'x');
  EXPECT_EQ(SyncCheck::Compare(root, root), SyncCheck::kSame);
  EXPECT_EQ(SyncCheck::Compare("", ""), SyncCheck::kSame);
  EXPECT_EQ(SyncCheck::Compare(root, ListOf({"a", "b", "c"}, 'y')), SyncCheck::kDiffers);
  EXPECT_EQ(SyncCheck::Compare(root, ListOf({"a", "b", "d"}, 'x')), SyncCheck::kDiffers + 2);
  EXPECT_EQ(SyncCheck::Compare(root, ListOf({"a"}, 'x')), SyncCheck::kDiffers + 1);
  EXPECT_EQ(SyncCheck::Compare(root, ListOf({"a", "b", "c", "d"}, 'x')), SyncCheck::kDiffers + 3);
  // What no client sends.
  EXPECT_EQ(SyncCheck::Compare(root + "z", root), SyncCheck::kDiffers + 3);
}

TEST(SyncCheckTest, TheErrorNamesRanksAndTheItem) {
  const std::string root = ListOf({"a", "fc.weight"}, 'x');
  EXPECT_TRUE(SyncCheck::Verdict({1, 1, 0}, root, "job").ok());
  absl::Status status = SyncCheck::Verdict({0, 1, 3, 1, 2}, root, "job");
  ExpectError(status, absl::StatusCode::kFailedPrecondition, "RANKS_DIVERGED");
  EXPECT_EQ(ErrorField(status, field::kRank), "2");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("ranks 2, 4 differ from rank 1. First of them, rank 2 differs in "
                        "'fc.weight' (item 1)"));
  status = SyncCheck::Verdict({1, 4}, root, "job");
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 has more items, from item 2"));
}

TEST(SyncCheckTest, RanksThatHaveTheSameAreInSync) {
  const TestDaemon daemon;
  const JobOfThreads job = JoinAll(daemon, 3, nullptr);
  const std::string large(5 << 20, 'l');
  OnEveryRank(3, [&](std::uint32_t rank) {
    const std::vector<StateItem> items = {{"large", large.data(), large.size()},
                                          {"empty", nullptr, 0}};
    absl::Status status = job.sessions[rank]->CheckInSync(items);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(job.sessions[rank]->CheckInSync({}).ok());
    // It waits for the others only in time.
    status = job.sessions[rank]->CheckInSync({{"", nullptr, 0}});
    ExpectError(status, absl::StatusCode::kInvalidArgument, "MALFORMED");
  });
}

TEST(SyncCheckTest, PauseEndsTheCheck) {
  const TestDaemon daemon;
  const JobOfThreads job = JoinAll(daemon, 1, nullptr);
  Session& session = *job.sessions[0];
  // Zeros that nobody hashes in the time of a test, and that take no memory.
  constexpr std::size_t kBytes = std::size_t{1} << 40;
  void* const zeros =
      mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(zeros, MAP_FAILED);
  auto checked = std::async(std::launch::async, [&] {
    // The pause may come before the check has begun.
    session.CallBegan(0);
    return session.CheckInSync({{"endless", zeros, kBytes}});
  });
  EXPECT_TRUE(session.PauseState().ok());
  EXPECT_EQ(checked.get().code(), absl::StatusCode::kCancelled);
  munmap(zeros, kBytes);
  const absl::Status status = session.CheckInSync({{"small", "abc", 3}});
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SyncCheckTest, EveryRankGetsTheSameError) {
  const TestDaemon daemon;
  const JobOfThreads job = JoinAll(daemon, 3, nullptr);
  std::vector<std::string> errors(3);
  OnEveryRank(3, [&](std::uint32_t rank) {
    const std::string value = rank == 1 ? "1.0000001" : "1.0000000";
    const absl::Status status = job.sessions[rank]->CheckInSync(
        {{"step", "12", 2}, {"optimizer.0.exp_avg", value.data(), value.size()}});
    ExpectError(status, absl::StatusCode::kFailedPrecondition, "RANKS_DIVERGED");
    errors[rank] = std::string(status.message());
    EXPECT_TRUE(job.sessions[rank]->Barrier().ok());  // the session goes on
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 differs in 'optimizer.0.exp_avg'"));
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(errors[0], errors[2]);
}

}  // namespace
}  // namespace gradsync
