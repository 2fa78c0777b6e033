// How sessions end, with real processes and signals: no call hangs, and every rank gets the reason.

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/deadline.h"
#include "tests/kit/soon.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync {
namespace {

using testing::HasSubstr;

// How many sockets this process has.
std::size_t OpenSockets() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    struct stat status;
    count += stat(entry.path().c_str(), &status) == 0 && S_ISSOCK(status.st_mode) ? 1 : 0;
  }
  return count;
}

class SessionEndTest : public testing::Test {
 protected:
  Layout& layout(std::uint32_t rank) { return *job_.layouts[rank]; }
  Session& session(std::uint32_t rank) { return *job_.sessions[rank]; }

  TestDaemon daemon_;
  const LayoutSpec spec_ = FloatBuckets(2, 1000);
  JobOfThreads job_ = JoinAll(daemon_, 2, &spec_);
};

TEST_F(SessionEndTest, LostDaemonReleasesEveryWait) {
  ASSERT_TRUE(layout(0).MarkReady(1, 0).ok());
  ASSERT_TRUE(MarkAllAndEnd(&layout(1), 1).ok());
  absl::Status statuses[4];
  std::uint64_t ends_ns[4];
  std::atomic<int> waiting{0};
  const auto wait = [&](int i, const std::function<absl::Status()>& call) {
    return std::thread([&, i, call] {
      ++waiting;
      statuses[i] = call();
      ends_ns[i] = NowNs();
    });
  };
  std::thread threads[] = {
      wait(0, [&] { return layout(0).WaitBucket(1, 1); }),
      wait(1, [&] { return layout(0).WaitStep(1).status(); }),
      wait(2, [&] { return layout(1).WaitStep(1).status(); }),
      wait(3, [&] { return session(0).Barrier(); }),
  };
  while (waiting < 4) std::this_thread::yield();
  const std::uint64_t killed_ns = NowNs();
  daemon_.Kill();
  for (std::thread& thread : threads) thread.join();
  for (const std::uint32_t rank : {0, 1}) EXPECT_TRUE(session(rank).HasEnded());
  ExpectError(statuses[0], absl::StatusCode::kUnavailable, "DAEMON_LOST");
  ExpectError(statuses[1], absl::StatusCode::kUnavailable, "DAEMON_LOST");
  // Rank 1 has ended the step: it cannot know whether it was committed.
  ExpectError(statuses[2], absl::StatusCode::kUnavailable, "STEP_IN_DOUBT");
  EXPECT_EQ(ErrorField(statuses[2], field::kStep), "1");
  ExpectError(statuses[3], absl::StatusCode::kUnavailable, "DAEMON_LOST");
  EXPECT_THAT(std::string(statuses[3].message()), HasSubstr("start gradsyncd"));
  // Milliseconds, but machines stall.
  for (const std::uint64_t end_ns : ends_ns) {
    EXPECT_LT(end_ns - killed_ns, FairBoundNs(2'000'000'000, killed_ns));
  }

  ExpectError(layout(0).MarkReady(1, 1), absl::StatusCode::kUnavailable, "DAEMON_LOST");
  ExpectError(session(0).Leave(), absl::StatusCode::kUnavailable, "DAEMON_LOST");
  ExpectError(session(0).RegisterLayout(FloatBuckets(1, 1)).status(),
              absl::StatusCode::kUnavailable, "DAEMON_LOST");
}

TEST_F(SessionEndTest, VerdictSurvivesLostDaemon) {
  OnEveryRank(2, [&](std::uint32_t rank) {
    Fill(layout(rank).bucket(0), static_cast<float>(rank));
    ASSERT_TRUE(MarkAllAndEnd(&layout(rank), 1).ok());
    ASSERT_TRUE(layout(rank).WaitStep(1).ok());
  });
  daemon_.Kill();
  ExpectError(session(0).Barrier(), absl::StatusCode::kUnavailable, "DAEMON_LOST");
  EXPECT_TRUE(layout(0).WaitStep(1).ok());
  ExpectError(layout(0).WaitStep(2).status(), absl::StatusCode::kUnavailable, "DAEMON_LOST");
  // The memory is still mapped.
  EXPECT_EQ(ValueOf(layout(0).bucket(0)), 0.5f);
}

TEST_F(SessionEndTest, LostRankAbortsTheOthers) {
  ASSERT_TRUE(layout(1).MarkReady(1, 0).ok());
  std::thread dying([&] { job_.sessions[0].reset(); });
  const absl::Status bucket = layout(1).WaitBucket(1, 0);
  ExpectError(bucket, absl::StatusCode::kAborted, "RANK_LOST");
  EXPECT_EQ(ErrorField(bucket, field::kRank), "0");
  ExpectError(layout(1).WaitStep(1).status(), absl::StatusCode::kAborted, "RANK_LOST");
  ExpectError(session(1).Barrier(), absl::StatusCode::kAborted, "RANK_LOST");
  dying.join();
}

TEST_F(SessionEndTest, HasEndedTellsErrorsOfTheSessionFromOthers) {
  ASSERT_TRUE(layout(0).MarkReady(1, 0).ok());
  ExpectError(layout(0).WaitStep(1, absl::ZeroDuration()).status(),
              absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
  ASSERT_TRUE(layout(1).AbandonStep(1, "a test").ok());
  ExpectError(layout(0).WaitStep(1).status(), absl::StatusCode::kAborted, "STEP_ABANDONED");
  for (const std::uint32_t rank : {0, 1}) EXPECT_FALSE(session(rank).HasEnded());
  job_.sessions[1].reset();
  // The same code as the abandoned step's. The session knows of its end before any call says so.
  ExpectError(session(0).Barrier(), absl::StatusCode::kAborted, "RANK_LOST");
  EXPECT_TRUE(session(0).HasEnded());
}

TEST_F(SessionEndTest, DrainingEndsSessions) {
  daemon_.process().Signal(SIGTERM);
  const absl::Status status = session(0).Barrier();
  ExpectError(status, absl::StatusCode::kUnavailable, "DRAINING");
}

TEST_F(SessionEndTest, LayoutOutlivesItsSession) {
  const auto mapping = layout(0).Mapping();
  const BucketView view = layout(0).bucket(0);
  Fill(view, 7);
  job_.sessions[0].reset();
  ExpectError(layout(0).MarkReady(1, 0), absl::StatusCode::kFailedPrecondition, "CLOSED");
  ExpectError(layout(0).WaitBucket(1, 0), absl::StatusCode::kFailedPrecondition, "CLOSED");
  ExpectError(layout(0).WaitStep(1).status(), absl::StatusCode::kFailedPrecondition, "CLOSED");
  job_.layouts[0].reset();
  EXPECT_EQ(ValueOf(view), 7);
}

// A Layout, or in Python a traceback, may live longer than anybody needs the connection.
TEST_F(SessionEndTest, EndedSessionClosesItsSocket) {
  const std::size_t open = OpenSockets();
  job_.sessions[0].reset();
  EXPECT_TRUE(Soon([&] { return OpenSockets() == open - 1; })) << "gRPC's own thread may close it";
  ASSERT_NE(job_.layouts[0], nullptr);
}

// Every wait ends soon after its time-out, whatever the daemon does.
TEST_F(SessionEndTest, StoppedDaemonDoesNotProlongWaits) {
  ASSERT_TRUE(MarkAllAndEnd(&layout(0), 1).ok());
  daemon_.process().Signal(SIGSTOP);
  const auto expect = [](std::uint64_t least_ns, std::uint64_t most_ns, absl::StatusCode code,
                         const std::function<absl::Status()>& call) {
    const std::uint64_t start_ns = NowNs();
    ExpectError(call(), code, "WAIT_TIMEOUT");
    EXPECT_GE(NowNs() - start_ns, least_ns);
    EXPECT_LT(NowNs() - start_ns, FairBoundNs(most_ns, start_ns));
  };
  const absl::Duration timeout = absl::Seconds(1);
  const auto late = absl::StatusCode::kDeadlineExceeded;
  expect(1'000'000'000, 1'700'000'000, late, [&] { return layout(0).WaitBucket(1, 0, timeout); });
  expect(1'000'000'000, 1'700'000'000, late,
         [&] { return layout(0).WaitStep(1, timeout).status(); });
  expect(1'000'000'000, 4'000'000'000, late, [&] { return session(0).Barrier(timeout); });
  LayoutSpec spec = FloatBuckets(1, 1);
  spec.name = "late";
  spec.timeout = timeout;
  expect(1'000'000'000, 4'000'000'000, late,
         [&] { return session(1).RegisterLayout(spec).status(); });
  SessionOptions options = OptionsOf(daemon_, 0, 1);
  options.job_id = "late";
  options.connect_timeout = timeout;
  expect(1'000'000'000, 3'000'000'000, absl::StatusCode::kUnavailable,
         [&] { return Session::Join(options).status(); });
}

TEST_F(SessionEndTest, DestructorReleasesWaitsOfOtherThreads) {
  ASSERT_TRUE(layout(0).MarkReady(1, 0).ok());
  std::atomic<int> waiting{0};
  std::thread bucket([&] {
    ++waiting;
    ExpectError(layout(0).WaitBucket(1, 0), absl::StatusCode::kFailedPrecondition, "CLOSED");
  });
  std::thread step([&] {
    ++waiting;
    ExpectError(layout(0).WaitStep(1).status(), absl::StatusCode::kFailedPrecondition, "CLOSED");
  });
  while (waiting < 2) std::this_thread::yield();
  job_.sessions[0].reset();
  bucket.join();
  step.join();
}

TEST_F(SessionEndTest, StoppedDaemonDoesNotHangDestructor) {
  daemon_.process().Signal(SIGSTOP);
  ASSERT_TRUE(layout(0).MarkReady(1, 0).ok());  // never waits for the daemon
  ExpectError(layout(0).WaitBucket(1, 0, absl::Milliseconds(10)),
              absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
  const std::uint64_t start_ns = NowNs();
  job_ = JobOfThreads();
  EXPECT_LT(NowNs() - start_ns, FairBoundNs(4'000'000'000, start_ns));
}

// Another operation while the daemon still has the first one would end the session.
TEST_F(SessionEndTest, UnansweredOperationIsTheLastOneAndStepsGoOn) {
  daemon_.process().Signal(SIGSTOP);
  for (const bool continued : {false, true}) {
    const absl::Status status = session(0).Barrier(absl::Milliseconds(1));
    ExpectError(status, absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
    EXPECT_THAT(std::string(status.message()), HasSubstr("gave up on operation 1")) << continued;
    if (!continued) daemon_.process().Signal(SIGCONT);
  }
  for (const std::uint32_t rank : {0, 1}) ASSERT_TRUE(MarkAllAndEnd(&layout(rank), 1).ok());
  for (const std::uint32_t rank : {0, 1}) EXPECT_TRUE(layout(rank).WaitStep(1).ok());
}

TEST_F(SessionEndTest, StoppedDaemonDoesNotBlockMarkReady) {
  LayoutSpec spec = FloatBuckets(4000, 1);
  spec.name = "many";
  std::vector<std::unique_ptr<Layout>> layouts(2);
  OnEveryRank(2, [&](std::uint32_t rank) {
    auto registered = session(rank).RegisterLayout(spec);
    ASSERT_TRUE(registered.ok()) << registered.status();
    layouts[rank] = *std::move(registered);
  });
  daemon_.process().Signal(SIGSTOP);
  const std::uint64_t start_ns = NowNs();
  for (const auto& layout : layouts) ASSERT_TRUE(MarkAllAndEnd(layout.get(), 1).ok());
  EXPECT_LT(NowNs() - start_ns, FairBoundNs(4'000'000'000, start_ns));
  daemon_.process().Signal(SIGCONT);
  for (const auto& layout : layouts) EXPECT_TRUE(layout->WaitStep(1).ok());
}

TEST(LeaseTest, AnsweredWhileTheTrainerComputes) {
  const TestDaemon daemon({"--lease=3s"});
  const JobOfThreads job = JoinAll(daemon, 1, nullptr);
  // Meanwhile two trainers that answer no question lose their leases, one after the other.
  for (const std::string silent_job : {"silent", "silent too"}) {
    fault::RawSession silent(daemon.socket());
    ASSERT_TRUE(silent.Open(0, 1, silent_job).has_value());
    EXPECT_TRUE(daemon.AwaitStatus([&](const v1::GetStatusResponse& status) {
      const auto& jobs = status.jobs();
      return std::any_of(jobs.begin(), jobs.end(), [&](const v1::JobStatus& one) {
        return one.job_id() == silent_job && one.state() == v1::JOB_STATE_FAILED;
      });
    }));
    EXPECT_EQ(silent.End().reason, "LEASE_EXPIRED");
  }
  EXPECT_TRUE(job.sessions[0]->Barrier().ok());
}

}  // namespace
}  // namespace gradsync
