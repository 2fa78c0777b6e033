#include "daemon/worker/worker_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/unique_fd.h"
#include "tests/engine/event.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;

class WorkerProcessTest : public ::testing::Test {
 protected:
  void Start(const std::string& script, WorkerProcessOptions options = {}) {
    options.program = "tests/worker/scripted_worker";
    options.environment.push_back("SCRIPT=" + script);
    auto worker =
        WorkerProcess::Start(options, [this](const absl::Status& why) { ended_.Set(why); });
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }

  void Call(worker::Call call, Event* answered) {
    worker_->Call(std::move(call), {},
                  [answered](const auto& reply) { answered->Set(reply.status()); });
  }
  absl::Status StartCall() {
    worker::Call call;
    call.mutable_start();
    Event answered;
    Call(std::move(call), &answered);
    return answered.Wait().value_or(absl::DeadlineExceededError("no answer"));
  }
  void Launch(Event* answered) {
    worker::Call call;
    call.mutable_launch();
    Call(std::move(call), answered);
  }

  // A call of some 10 KB.
  void LargeLaunch(Event* answered) {
    worker::Call call;
    for (int i = 0; i < 1000; ++i) call.mutable_launch()->add_arenas(~std::uint64_t{0});
    Call(std::move(call), answered);
  }

  Event ended_;
  std::unique_ptr<WorkerProcess> worker_;
};

TEST_F(WorkerProcessTest, AnswersEveryCallAndStops) {
  Start("");
  EXPECT_TRUE(StartCall().ok());
  Event answers[3];
  for (Event& answer : answers) Launch(&answer);
  for (Event& answer : answers) EXPECT_EQ(answer.Wait(), absl::OkStatus());
  const pid_t pid = worker_->pid();
  worker_.reset();
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
  // The end is not reported, since the test stopped the worker.
  EXPECT_FALSE(ended_.Wait(std::chrono::milliseconds(0)).has_value());
}

TEST_F(WorkerProcessTest, ReturnsTheWorkersError) {
  Start("refuses");
  Event answered;
  Launch(&answered);
  const absl::Status status = answered.Wait().value();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(status).reason, "GPU_OUT_OF_MEMORY");
  EXPECT_EQ(DetailsOf(status).fields.at(0).second, "v");
}

TEST_F(WorkerProcessTest, ReportsHowAWorkerEnded) {
  const std::pair<std::string, std::string> kEnds[] = {
      {"crashes", "killed by signal 9"},
      {"exits", "exited with status 7"},
      {"fails", "has failed: cuCall: ECC"},
      {"closes its socket", "closed its socket"},
      {"passes a descriptor", "sent more descriptors than its reply needs, and was killed"},
  };
  for (const auto& [script, how] : kEnds) {
    Event ended;
    WorkerProcessOptions options;
    options.program = "tests/worker/scripted_worker";
    options.environment = {"SCRIPT=" + script};
    auto worker = WorkerProcess::Start(options, [&](const absl::Status& why) { ended.Set(why); });
    ASSERT_TRUE(worker.ok());
    worker_ = *std::move(worker);
    Event answered;
    Launch(&answered);
    for (Event* const event : {&answered, &ended}) {
      const absl::Status why = event->Wait().value();
      EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
      EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
      EXPECT_THAT(why.message(), HasSubstr(how));
    }
    // Later calls are answered at once.
    Event late;
    Launch(&late);
    EXPECT_EQ(DetailsOf(late.Wait().value()).reason, "WORKER_LOST");
    worker_.reset();
  }
}

// The child has the worker's socket. As long as it can send, the test reads no message before the
// child has sent the next one, so the socket is never empty.
TEST_F(WorkerProcessTest, SeesTheEndOfAWorkerWhoseChildGoesOnSending) {
  const TemporaryDirectory directory;
  const std::string fifo = directory.File("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const UniqueFd sent(open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_EQ(fcntl(sent.get(), F_SETFL, 0), 0);  // from now on read() waits
  WorkerProcessOptions options;
  options.environment = {"FIFO=" + fifo};
  int ahead = 0;
  options.event = [&](const worker::EngineEvent&) {
    char byte;
    for (--ahead; ahead < 1 && read(sent.get(), &byte, 1) == 1;) ++ahead;
  };
  Start("leaves a child that sends", options);
  Event answered;
  Launch(&answered);
  for (Event* const event : {&answered, &ended_}) {
    const absl::Status why = event->Wait().value_or(absl::OkStatus());
    EXPECT_THAT(why.message(), HasSubstr("exited with status 7"));
  }
  worker_.reset();  // its thread uses `sent` and `ahead`
}

TEST_F(WorkerProcessTest, KillsAWorkerThatHangs) {
  WorkerProcessOptions options;
  options.ping_interval = absl::Milliseconds(20);
  options.hang_limit = absl::Milliseconds(200);
  Start("hangs", options);
  EXPECT_TRUE(StartCall().ok());
  Event answered;
  Launch(&answered);
  EXPECT_THAT(answered.Wait().value().message(), HasSubstr("no sign of life for 200ms"));
  EXPECT_EQ(DetailsOf(ended_.Wait().value()).reason, "WORKER_LOST");
}

TEST_F(WorkerProcessTest, KillsAWorkerThatHasFailedAndStays) {
  WorkerProcessOptions options;
  options.start_limit = absl::Hours(1);  // so nothing else ends it
  Start("fails and stays", options);
  Event answered;
  Launch(&answered);
  for (Event* const event : {&answered, &ended_}) {
    const absl::Status why = event->Wait().value_or(absl::OkStatus());
    EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
    EXPECT_THAT(why.message(), HasSubstr("has failed: cuCall: ECC"));
  }
}

TEST_F(WorkerProcessTest, KillsAWorkerThatIsStopped) {
  WorkerProcessOptions options;
  options.ping_interval = absl::Milliseconds(20);
  options.hang_limit = absl::Milliseconds(200);
  Start("takes its time", options);
  EXPECT_TRUE(StartCall().ok());
  kill(worker_->pid(), SIGSTOP);
  Event answered;
  Launch(&answered);
  EXPECT_THAT(answered.Wait().value().message(), HasSubstr("no sign of life"));
}

// It may take long to answer, but the daemon does not keep calls for it without end.
TEST_F(WorkerProcessTest, KillsAWorkerThatDoesNotRead) {
  WorkerProcessOptions options;
  options.hang_limit = absl::Hours(1);
  options.start_limit = absl::Hours(1);
  options.queue_limit_bytes = 64 << 10;
  Start("", options);
  EXPECT_TRUE(StartCall().ok());
  kill(worker_->pid(), SIGSTOP);
  // Together they take far more than a socket holds.
  Event answers[2000];
  for (Event& answered : answers) LargeLaunch(&answered);
  for (Event& answered : answers) {
    const auto why = answered.Wait();
    ASSERT_TRUE(why.has_value());
    EXPECT_EQ(DetailsOf(*why).reason, "WORKER_LOST");
    ASSERT_THAT(why->message(), HasSubstr("did not read the daemon's calls"));
  }
}

TEST_F(WorkerProcessTest, CallsThatTheWorkerHasReadDoNotCount) {
  WorkerProcessOptions options;
  options.queue_limit_bytes = 4 << 20;  // enough for the calls of one round, but not of all
  Start("", options);
  EXPECT_TRUE(StartCall().ok());
  for (int round = 0; round < 4; ++round) {
    kill(worker_->pid(), SIGSTOP);
    Event answers[200];
    for (Event& answered : answers) LargeLaunch(&answered);
    kill(worker_->pid(), SIGCONT);
    for (Event& answered : answers) EXPECT_EQ(answered.Wait(), absl::OkStatus());
  }
}

TEST_F(WorkerProcessTest, WaitsForALaunchWhileTheWorkerAnswersPings) {
  WorkerProcessOptions options;
  options.ping_interval = absl::Milliseconds(10);
  options.hang_limit = absl::Seconds(3);  // even a busy machine delays no process by as much
  Start("takes its time", options);
  EXPECT_TRUE(StartCall().ok());
  Event answered;
  Launch(&answered);
  EXPECT_FALSE(answered.Wait(std::chrono::milliseconds(5000)).has_value());
  EXPECT_EQ(worker_->memory().arena_bytes(), 0u) << "its pings do not ask for memory";
  worker_.reset();
  EXPECT_EQ(answered.Wait().value().code(), absl::StatusCode::kCancelled);
}

TEST_F(WorkerProcessTest, KillsAWorkerThatDoesNotStart) {
  WorkerProcessOptions options;
  options.start_limit = absl::Milliseconds(100);
  Start("never starts", options);
  EXPECT_THAT(StartCall().message(), HasSubstr("while it started"));
}

TEST_F(WorkerProcessTest, KillsAWorkerThatDoesNotStop) {
  WorkerProcessOptions options;
  options.stop_limit = absl::Milliseconds(100);
  Start("does not stop", options);
  EXPECT_TRUE(StartCall().ok());
  const pid_t pid = worker_->pid();
  worker_.reset();
  EXPECT_EQ(kill(pid, 0), -1);
}

TEST_F(WorkerProcessTest, EndsAfterBeginStop) {
  Start("");
  EXPECT_TRUE(StartCall().ok());
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, worker_->pid(), 0));
  worker_->BeginStop();
  EXPECT_EQ(StartCall().code(), absl::StatusCode::kCancelled) << "it takes no more calls";
  pollfd end{pidfd, POLLIN, 0};
  EXPECT_EQ(poll(&end, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count())), 1);
  close(pidfd);
  worker_.reset();
  EXPECT_FALSE(ended_.Wait(std::chrono::milliseconds(0)).has_value())
      << "a stopped worker is not lost";
}

// As when a callback drops the last reference to the process.
TEST_F(WorkerProcessTest, BeginsToStopInACallback) {
  Start("");
  EXPECT_TRUE(StartCall().ok());
  Event answered;
  worker::Call launch;
  launch.mutable_launch();
  worker_->Call(std::move(launch), {}, [&](const auto& reply) {
    worker_->BeginStop();
    answered.Set(reply.status());
  });
  EXPECT_EQ(answered.Wait(), absl::OkStatus());
  const pid_t pid = worker_->pid();
  worker_.reset();
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST_F(WorkerProcessTest, MissingProgramIsAnError) {
  WorkerProcessOptions options;
  options.program = "/nonexistent/gradsyncd";
  const auto worker = WorkerProcess::Start(options, [](const absl::Status&) {});
  EXPECT_EQ(worker.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(worker.status().message(), HasSubstr("/nonexistent/gradsyncd"));
}

// A worker must inherit no open descriptor of the daemon, above all no socket of a trainer.
TEST_F(WorkerProcessTest, InheritsOnlyItsSocket) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);  // without O_CLOEXEC
  Start("");
  EXPECT_TRUE(StartCall().ok());
  close(pipe_ends[1]);
  char byte;
  EXPECT_EQ(read(pipe_ends[0], &byte, 1), 0);  // end of file: no process has the other end
  close(pipe_ends[0]);
}

}  // namespace
}  // namespace gradsync::daemon
