#include "daemon/worker/worker_supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/restart_policy.h"
#include "tests/engine/event.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kSecondNs = 1'000'000'000;

std::string ReasonOf(const absl::Status& status) { return DetailsOf(status).reason; }

// A user who runs in two pods.
const Tenant kInPodA(1, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60"));
const Tenant kInPodB(1, *PodId::Parse("0a4d5e7c111142229333abcdefabcdef"));

constexpr std::size_t kMaxStarting = 2;
constexpr std::size_t kMaxEnded = 3;
constexpr std::uint64_t kTurnLimitNs = 3 * kSecondNs;
constexpr std::uint64_t kCheckIntervalNs = 5 * kSecondNs;

// Keeps work until a test runs it. Thread-safe. The destructor runs everything that is left.
class HeldExecutor final : public Executor {
 public:
  ~HeldExecutor() override { RunAll(); }

  void Run(std::function<void()> work) override {
    const MutexLock lock(&mutex_);
    held_.push_back(std::move(work));
  }
  void RunAll() {
    std::vector<std::function<void()>> work;
    {
      const MutexLock lock(&mutex_);
      work.swap(held_);
    }
    for (const auto& piece : work) piece();
  }

 private:
  Mutex mutex_;
  std::vector<std::function<void()>> held_ ABSL_GUARDED_BY(mutex_);
};

// Sees the end of a process that lives when this object is made. Does not reap it.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid) : pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

  // False if the process has not ended within kPatience.
  bool AwaitEnd() const {
    pollfd end{pidfd_.get(), POLLIN, 0};
    return poll(&end, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count())) == 1;
  }

 private:
  UniqueFd pidfd_;
};

class WorkerSupervisorTest : public ::testing::Test {
 protected:
  // Waits for callbacks that are running on the workers' threads.
  void TearDown() override {
    if (supervisor_ != nullptr) supervisor_->Shutdown();
  }

  void Begin(const std::string& script, absl::Duration hang_limit = absl::Seconds(20),
             const std::string& cuda_library = "libcuda.so.1",
             const std::string& program = "tests/worker/scripted_worker") {
    WorkerSupervisorOptions options;
    options.cuda_library = cuda_library;
    options.process.program = program;
    options.process.environment = {"SCRIPT=" + script};
    options.process.ping_interval = absl::Hours(1);  // so only Tick pings
    options.process.hang_limit = hang_limit;
    options.idle_limit_ns = 60 * kSecondNs;
    options.check_interval_ns = kCheckIntervalNs;
    options.max_starting_per_user = max_starting_;
    options.starting_at_once_per_user = at_once_;
    options.turn_limit_ns = kTurnLimitNs;
    options.max_ended_per_user = kMaxEnded;
    supervisor_ = WorkerSupervisor::Make(
        options,
        [this](const WorkerKey& key, const absl::Status& why) {
          (key.job == "a" ? lost_ : other_lost_).Set(why);
        },
        &clock_, reaper_);
  }

  absl::StatusOr<std::shared_ptr<WorkerProcess>> Ensure(const WorkerKey& key) {
    absl::StatusOr<std::shared_ptr<WorkerProcess>> result = nullptr;
    Event ready;
    supervisor_->Ensure(key, [&](auto worker) {
      result = std::move(worker);
      ready.Set();
    });
    EXPECT_TRUE(ready.Wait().has_value());
    return result;
  }

  // Asks for all of them. Their answers come to answers_.
  void EnsureAll(const std::vector<WorkerKey>& keys) {
    answers_ = std::vector<Event>(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      supervisor_->Ensure(keys[i],
                          [this, i](const auto& worker) { answers_[i].Set(worker.status()); });
    }
  }

  // Jobs and GPUs of the workers whose processes run. The others wait for their turn.
  std::vector<std::string> Running() {
    std::vector<std::string> running;
    for (const WorkerStatus& worker : supervisor_->Workers()) {
      EXPECT_EQ(worker.awaits_turn, worker.pid == 0) << worker.key.device;
      if (worker.pid != 0) running.push_back(worker.key.job + " " + worker.key.device);
    }
    return running;
  }

  // Waits until the process objects of all workers that have ended are destroyed.
  void AwaitReaper() {
    Event done;
    executor_.Run([&done] { done.Set(); });
    EXPECT_TRUE(done.Wait().has_value());
  }

  // Limits for each user. Set them before Begin.
  std::size_t max_starting_ = kMaxStarting;
  std::size_t at_once_ = kMaxStarting;
  std::vector<Event> answers_;
  Event lost_;        // a worker of job "a" is lost
  Event other_lost_;  // another worker is lost
  ManualClock clock_;
  SerialExecutor executor_;
  HeldExecutor held_;
  Executor* reaper_ = &executor_;
  std::shared_ptr<WorkerSupervisor> supervisor_;
};

TEST_F(WorkerSupervisorTest, KeepsOneWorkerPerJobAndGpu) {
  Begin("");
  const auto first = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*Ensure({"a", "GPU-1"}))->pid(), (*first)->pid());
  EXPECT_NE((*Ensure({"a", "GPU-2"}))->pid(), (*first)->pid());
  EXPECT_NE((*Ensure({"b", "GPU-1"}))->pid(), (*first)->pid());
  const auto workers = supervisor_->Workers();
  ASSERT_EQ(workers.size(), 3u);
  EXPECT_EQ(workers[0].pid, (*first)->pid());
  EXPECT_EQ(workers[0].started.devices(0).uuid(), "GPU-1");
}

TEST_F(WorkerSupervisorTest, ShowsAWorkerOnlyItsMigInstance) {
  Begin("");
  ASSERT_TRUE(Ensure({"a", "MIG-7"}).ok());
  EXPECT_EQ(supervisor_->Workers()[0].started.devices(0).name(), "MIG-7");
}

TEST_F(WorkerSupervisorTest, LostWorkerIsReplacedAtTheNextEnsure) {
  Begin("");
  const auto first = Ensure({"a", "GPU-1"});
  const auto other = Ensure({"b", "GPU-1"});
  ASSERT_TRUE(first.ok());
  kill((*first)->pid(), SIGKILL);
  const absl::Status why = lost_.Wait().value();
  EXPECT_EQ(ReasonOf(why), "WORKER_LOST");
  EXPECT_EQ(supervisor_->Workers()[0].pid, 0);
  EXPECT_THAT(supervisor_->Workers()[0].last_failure, HasSubstr("killed by signal 9"));
  EXPECT_FALSE(other_lost_.Wait(std::chrono::milliseconds(0)).has_value());
  EXPECT_NE((*Ensure({"a", "GPU-1"}))->pid(), (*first)->pid());
  EXPECT_EQ((*Ensure({"b", "GPU-1"}))->pid(), (*other)->pid());
}

TEST_F(WorkerSupervisorTest, EnsureNeverReturnsAnEndedProcess) {
  Begin("takes its time");
  const auto first = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(first.ok());
  absl::StatusOr<std::shared_ptr<WorkerProcess>> second = nullptr;
  Event ready;
  worker::Call launch;
  launch.mutable_launch();
  // When a process ends, its calls are answered before the supervisor learns of the end.
  (*first)->Call(launch, {}, [&](const auto& reply) {
    EXPECT_EQ(ReasonOf(reply.status()), "WORKER_LOST");
    supervisor_->Ensure({"a", "GPU-1"}, [&](auto worker) {
      second = std::move(worker);
      ready.Set();
    });
  });
  kill((*first)->pid(), SIGKILL);
  ASSERT_TRUE(ready.Wait().has_value());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE((*second)->pid(), (*first)->pid());
  EXPECT_TRUE(lost_.Wait().has_value());
}

TEST_F(WorkerSupervisorTest, EnsureNeverReturnsAProcessThatIsBeingKilled) {
  Begin("");
  const auto first = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(first.ok());
  (*first)->Kill(absl::UnavailableError("another GPU's worker was lost"));
  EXPECT_TRUE((*first)->HasEnded());
  const auto second = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE((*second)->pid(), (*first)->pid());
}

TEST_F(WorkerSupervisorTest, RefusalIsRepeated) {
  Begin("has no GPU");
  for (int i = 0; i < 5; ++i) {
    const absl::Status refused = Ensure({"a", "GPU-1"}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << i;
    EXPECT_EQ(ReasonOf(refused), "GPU_NOT_VISIBLE") << i;
  }
  clock_.Advance(kSecondNs);
  EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-1"}).status()), "GPU_NOT_VISIBLE");
  ASSERT_EQ(supervisor_->Workers().size(), 1u);
  EXPECT_EQ(supervisor_->Workers()[0].last_failure, "not there");
  EXPECT_EQ(supervisor_->Workers()[0].restarts, 0u) << "a refusal is not a failure";
}

// A trainer may name a GPU that does not exist in each request.
TEST_F(WorkerSupervisorTest, RemembersAFewEndedWorkersOfEachUser) {
  Begin("has no GPU");
  EXPECT_FALSE(Ensure({"b", "GPU-1", Tenant(2)}).ok());
  for (std::size_t i = 0; i < kMaxEnded + 3; ++i) {
    EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-" + std::to_string(i), Tenant(1)}).status()),
              "GPU_NOT_VISIBLE");
    AwaitReaper();  // else it counts among the user's starting workers
  }
  // The last one began when kMaxEnded were left.
  std::vector<std::string> remembered;
  for (const WorkerStatus& worker : supervisor_->Workers()) {
    remembered.push_back(worker.key.job + " " + worker.key.device);
  }
  EXPECT_EQ(remembered,
            (std::vector<std::string>{"a GPU-2", "a GPU-3", "a GPU-4", "a GPU-5", "b GPU-1"}));
}

// Pods may share a user id. One pod's requests make the daemon forget no worker of another pod.
TEST_F(WorkerSupervisorTest, RemembersEndedWorkersOfEachPod) {
  Begin("has no GPU");
  EXPECT_FALSE(Ensure({"b", "GPU-1", kInPodB}).ok());
  for (std::size_t i = 0; i < kMaxEnded + 2; ++i) {
    EXPECT_FALSE(Ensure({"a", "GPU-" + std::to_string(i), kInPodA}).ok());
    AwaitReaper();  // else it counts among the starting workers
  }
  const auto workers = supervisor_->Workers();
  ASSERT_EQ(workers.size(), kMaxEnded + 2) << "kMaxEnded, the last one and the other pod's";
  EXPECT_EQ(workers.back().key.job, "b");
}

TEST_F(WorkerSupervisorTest, RemembersAFewWorkersThatCouldNotBeStarted) {
  Begin("", absl::Seconds(20), "libcuda.so.1", "tests/worker/no_such_program");
  for (std::size_t i = 0; i < kMaxEnded + 3; ++i) {
    EXPECT_FALSE(Ensure({"a", "GPU-" + std::to_string(i), Tenant(1)}).ok());
  }
  EXPECT_EQ(supervisor_->Workers().size(), kMaxEnded + 1);
}

TEST_F(WorkerSupervisorTest, FailedStartDelaysTheNextOne) {
  Begin("dies at start");
  EXPECT_THAT(Ensure({"a", "GPU-1"}).status().message(), HasSubstr("exited with status 6"));
  EXPECT_THAT(Ensure({"a", "GPU-1"}).status().message(), HasSubstr("exited with status 6"));
  EXPECT_EQ(supervisor_->Workers()[0].restarts, 1u);
  const absl::Status paused = Ensure({"a", "GPU-1"}).status();
  EXPECT_EQ(ReasonOf(paused), "WORKER_RESTARTING");
  EXPECT_THAT(paused.message(), HasSubstr("failed 2 times, last: "));
}

TEST_F(WorkerSupervisorTest, LimitsStartingWorkersOfAUser) {
  Begin("never starts");
  const std::vector<WorkerKey> keys = {
      {"a", "GPU-1"}, {"a", "GPU-2"}, {"a", "GPU-1"}, {"b", "GPU-3"}};
  std::vector<Event> ended(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    supervisor_->Ensure(keys[i],
                        [&ended, i](const auto& worker) { ended[i].Set(worker.status()); });
  }
  const absl::Status refused =
      ended.back().Wait(std::chrono::milliseconds(0)).value_or(absl::UnknownError("it starts"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused), "WORKERS_STARTING");
  EXPECT_EQ(supervisor_->Workers().size(), kMaxStarting) << "a refused worker is not kept";
  Event other;
  WorkerKey other_users = {"a", "GPU-3"};
  other_users.user = Tenant(1000);
  supervisor_->Ensure(other_users, [&other](const auto& worker) { other.Set(worker.status()); });
  EXPECT_FALSE(other.Wait(std::chrono::milliseconds(0)).has_value()) << "another user's starts";
  supervisor_->Shutdown();
  EXPECT_FALSE(other.Wait().value().ok());
  for (Event& event : ended) EXPECT_FALSE(event.Wait().value().ok());
}

TEST_F(WorkerSupervisorTest, RefusedWorkersCountUntilTheyAreDestroyed) {
  reaper_ = &held_;
  Begin("has no GPU");
  for (std::size_t i = 0; i < kMaxStarting; ++i) {
    EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-" + std::to_string(i), Tenant(1)}).status()),
              "GPU_NOT_VISIBLE");
  }
  const absl::Status refused = Ensure({"a", "GPU-new", Tenant(1)}).status();
  EXPECT_EQ(ReasonOf(refused), "WORKERS_STARTING");
  EXPECT_THAT(
      refused.message(),
      HasSubstr("2 workers of user 1 are starting, waiting to start or ending on this node"));
  EXPECT_EQ(ReasonOf(Ensure({"b", "GPU-new", Tenant(2)}).status()), "GPU_NOT_VISIBLE")
      << "another user's workers do not count";
  held_.RunAll();
  EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-new", Tenant(1)}).status()), "GPU_NOT_VISIBLE");
}

TEST_F(WorkerSupervisorTest, LimitsStartingWorkersOfAUserInEachPod) {
  reaper_ = &held_;
  Begin("has no GPU");
  for (std::size_t i = 0; i < kMaxStarting; ++i) {
    EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-" + std::to_string(i), kInPodA}).status()),
              "GPU_NOT_VISIBLE");
  }
  const absl::Status refused = Ensure({"a", "GPU-new", kInPodA}).status();
  EXPECT_EQ(ReasonOf(refused), "WORKERS_STARTING");
  EXPECT_THAT(refused.message(),
              HasSubstr("2 workers of user 1 in pod 6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60 are "));
  EXPECT_EQ(ReasonOf(Ensure({"b", "GPU-new", kInPodB}).status()), "GPU_NOT_VISIBLE")
      << "another pod's workers do not count";
  EXPECT_EQ(ReasonOf(Ensure({"c", "GPU-new", Tenant(kInPodA.uid)}).status()), "GPU_NOT_VISIBLE")
      << "nor do they outside of pods";
  held_.RunAll();
  EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-new", kInPodA}).status()), "GPU_NOT_VISIBLE");
}

// ---- Turns. GPU-1 starts. The others answer nothing, so they keep their turns.

TEST_F(WorkerSupervisorTest, WorkersOfAUserWaitForTheirTurnToStart) {
  max_starting_ = 4;
  at_once_ = 2;
  Begin("starts GPU-1 alone");
  EnsureAll({{"a", "GPU-2"}, {"a", "GPU-3"}, {"a", "GPU-1"}, {"a", "GPU-1"}, {"b", "GPU-1"}});
  EXPECT_EQ(Running(), (std::vector<std::string>{"a GPU-2", "a GPU-3"}));
  EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-4"}).status()), "WORKERS_STARTING") << "four wait or start";
  EXPECT_TRUE(Ensure({"d", "GPU-1", Tenant(2)}).ok()) << "of another user";
  EXPECT_TRUE(Ensure({"c", "GPU-1", kInPodB}).ok()) << "of another user's pod";
}

TEST_F(WorkerSupervisorTest, WorkerThatHangsKeepsItsTurnForAWhile) {
  max_starting_ = 4;
  at_once_ = 1;
  Begin("starts GPU-1 alone");
  EnsureAll({{"a", "GPU-2"}, {"a", "GPU-1"}, {"a", "GPU-1"}, {"b", "GPU-1"}});
  clock_.Advance(kTurnLimitNs);
  EXPECT_TRUE(supervisor_->Tick());
  EXPECT_EQ(Running(), std::vector<std::string>{"a GPU-2"});
  clock_.Advance(1);
  EXPECT_TRUE(supervisor_->Tick());
  for (std::size_t i = 1; i < 4; ++i) EXPECT_EQ(answers_[i].Wait(), absl::OkStatus()) << i;
}

TEST_F(WorkerSupervisorTest, NextWorkerStartsOnceOneHasOpenedItsGpuOrRefusedIt) {
  const std::vector<std::pair<std::string, std::string>> reasons = {
      {"", ""}, {"has no GPU", "GPU_NOT_VISIBLE"}, {"dies at start", "WORKER_LOST"}};
  for (const auto& [script, reason] : reasons) {
    max_starting_ = 4;
    at_once_ = 1;
    reaper_ = &held_;  // the turn does not last until the process object is destroyed
    Begin(script);
    EnsureAll({{"a", "GPU-1"}, {"a", "GPU-2"}, {"a", "GPU-3"}, {"a", "GPU-4"}});
    for (Event& answer : answers_) {
      const auto why = answer.Wait();
      ASSERT_TRUE(why.has_value());
      EXPECT_EQ(ReasonOf(*why), reason);
    }
    supervisor_->Shutdown();
    held_.RunAll();
  }
}

// The table keeps the key of the pod that asked first.
TEST_F(WorkerSupervisorTest, TurnIsOfThePodThatHasTheWorkerStarted) {
  max_starting_ = 4;
  at_once_ = 1;
  Begin("has no GPU");
  EXPECT_FALSE(Ensure({"a", "GPU-1", kInPodA}).ok());
  clock_.Advance(kSecondNs);  // else it is refused at once
  EnsureAll({{"a", "GPU-0", kInPodB}, {"a", "GPU-1", kInPodB}, {"a", "GPU-2", kInPodB}});
  for (Event& answer : answers_) {
    const auto why = answer.Wait();
    ASSERT_TRUE(why.has_value());
    EXPECT_EQ(ReasonOf(*why), "GPU_NOT_VISIBLE");
  }
  AwaitReaper();
  EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-3", kInPodB}).status()), "GPU_NOT_VISIBLE");
}

TEST_F(WorkerSupervisorTest, WorkersThatCannotBeStartedInTheirTurnLetTheNextStart) {
  max_starting_ = 4;
  at_once_ = 1;
  const TemporaryDirectory folder;
  const std::string program = folder.File("worker");
  std::filesystem::create_symlink(std::filesystem::absolute("tests/worker/scripted_worker"),
                                  program);
  Begin("starts GPU-1 alone", absl::Seconds(20), "libcuda.so.1", program);
  EnsureAll({{"a", "GPU-2"}, {"a", "GPU-3"}, {"a", "GPU-1"}});
  std::filesystem::remove(program);
  clock_.Advance(kTurnLimitNs + 1);
  EXPECT_TRUE(supervisor_->Tick());
  for (std::size_t i = 1; i < 3; ++i) {
    EXPECT_THAT(answers_[i].Wait().value_or(absl::OkStatus()).message(), HasSubstr("No such file"));
  }
}

TEST_F(WorkerSupervisorTest, ShutdownAnswersThoseThatWaitForTheirTurn) {
  at_once_ = 1;
  Begin("never starts");
  EnsureAll({{"a", "GPU-0"}, {"a", "GPU-1"}});
  supervisor_->Shutdown();
  EXPECT_EQ(answers_[1].Wait().value_or(absl::OkStatus()).code(), absl::StatusCode::kCancelled);
}

// ---- Pods

TEST_F(WorkerSupervisorTest, RanksOfAJobInSeveralPodsShareAWorker) {
  Begin("");
  const auto first = Ensure({"a", "GPU-1", kInPodA});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*Ensure({"a", "GPU-1", kInPodB}))->pid(), (*first)->pid());
}

TEST_F(WorkerSupervisorTest, NextWorkerCountsForThePodThatHasItStarted) {
  Begin("starts GPU-1 alone");
  const auto first = Ensure({"a", "GPU-1", kInPodA});
  ASSERT_TRUE(first.ok()) << first.status();
  for (std::size_t i = 0; i < kMaxStarting; ++i) {
    supervisor_->Ensure({"b", "GPU-" + std::to_string(2 + i), kInPodA}, [](const auto&) {});
  }
  absl::Status in_pod_a;
  absl::StatusOr<std::shared_ptr<WorkerProcess>> in_pod_b = nullptr;
  Event ready;
  worker::Call launch;
  launch.mutable_launch();
  // The process has ended, and the supervisor learns of it afterwards. So both wait for its end.
  (*first)->Call(launch, {}, [&](const auto&) {
    supervisor_->Ensure({"a", "GPU-1", kInPodA},
                        [&](const auto& worker) { in_pod_a = worker.status(); });
    supervisor_->Ensure({"a", "GPU-1", kInPodB}, [&](auto worker) {
      in_pod_b = std::move(worker);
      ready.Set();
    });
  });
  kill((*first)->pid(), SIGKILL);
  ASSERT_TRUE(ready.Wait().has_value());
  EXPECT_EQ(ReasonOf(in_pod_a), "WORKERS_STARTING");
  EXPECT_TRUE(in_pod_b.ok()) << in_pod_b.status();
}

TEST_F(WorkerSupervisorTest, WorkersThatDieAtStartCountUntilTheyAreDestroyed) {
  reaper_ = &held_;
  Begin("dies at start");
  for (std::size_t i = 0; i < kMaxStarting; ++i) {
    EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-" + std::to_string(i), Tenant(1)}).status()),
              "WORKER_LOST");
  }
  EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-new", Tenant(1)}).status()), "WORKERS_STARTING");
}

TEST_F(WorkerSupervisorTest, WorkersThatHaveOpenedTheirGpusDoNotCount) {
  reaper_ = &held_;
  Begin("");
  for (std::size_t i = 0; i < kMaxStarting + 1; ++i) {
    EXPECT_TRUE(Ensure({"a", "GPU-" + std::to_string(i), Tenant(1)}).ok()) << "open";
  }
  EXPECT_TRUE(supervisor_->Tick());
  clock_.Advance(61 * kSecondNs);
  EXPECT_FALSE(supervisor_->Tick());
  EXPECT_TRUE(Ensure({"a", "GPU-new", Tenant(1)}).ok()) << "ending";
}

TEST_F(WorkerSupervisorTest, WorkersEndBeforeTheReaperDestroysThem) {
  reaper_ = &held_;
  Begin("");
  std::vector<ProcessWatch> processes;
  for (const char* const device : {"GPU-1", "GPU-2"}) {
    const auto worker = Ensure({"a", device});
    ASSERT_TRUE(worker.ok()) << worker.status();
    processes.emplace_back((*worker)->pid());
  }
  EXPECT_TRUE(supervisor_->Tick());
  clock_.Advance(61 * kSecondNs);
  EXPECT_FALSE(supervisor_->Tick());
  for (const ProcessWatch& process : processes) EXPECT_TRUE(process.AwaitEnd());
}

TEST_F(WorkerSupervisorTest, ReaperMayDestroyAWorkerAfterTheSupervisor) {
  reaper_ = &held_;
  Begin("has no GPU");
  EXPECT_FALSE(Ensure({"a", "GPU-1"}).ok());
  supervisor_.reset();
  held_.RunAll();
}

TEST_F(WorkerSupervisorTest, StopsAnIdleWorker) {
  Begin("");
  auto worker = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(worker.ok());
  const pid_t pid = (*worker)->pid();
  const ProcessWatch process(pid);
  clock_.Advance(100 * kSecondNs);
  EXPECT_TRUE(supervisor_->Tick()) << "a caller holds the worker";
  worker->reset();
  EXPECT_TRUE(supervisor_->Tick());
  clock_.Advance(50 * kSecondNs);
  EXPECT_TRUE(supervisor_->Tick());
  worker = Ensure({"a", "GPU-1"});
  EXPECT_EQ((*worker)->pid(), pid) << "the next trainers get the same worker";
  EXPECT_TRUE(supervisor_->Tick());
  worker->reset();
  EXPECT_TRUE(supervisor_->Tick());
  clock_.Advance(61 * kSecondNs);
  EXPECT_FALSE(supervisor_->Tick());
  EXPECT_TRUE(supervisor_->Workers().empty());
  EXPECT_TRUE(process.AwaitEnd());
  EXPECT_FALSE(lost_.Wait(std::chrono::milliseconds(0)).has_value())
      << "a stopped worker is not lost";
}

// Between two steps nothing else calls the worker.
TEST_F(WorkerSupervisorTest, CheckEndsAWorkerWhoseGpuHasFailed) {
  Begin("has failed");
  const auto worker = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(worker.ok()) << worker.status();
  clock_.Advance(kCheckIntervalNs);
  EXPECT_TRUE(supervisor_->Tick());
  const absl::Status why = lost_.Wait().value_or(absl::OkStatus());
  EXPECT_EQ(ReasonOf(why), "WORKER_LOST");
  EXPECT_THAT(why.message(), HasSubstr("cuCall: ECC"));
  EXPECT_NE((*Ensure({"a", "GPU-1"}))->pid(), (*worker)->pid());
}

TEST_F(WorkerSupervisorTest, KillsAWorkerThatDoesNotAnswerACheck) {
  Begin("answers no ping", absl::Milliseconds(100));
  const auto worker = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(worker.ok()) << worker.status();
  clock_.Advance(kCheckIntervalNs);
  EXPECT_TRUE(supervisor_->Tick());
  const absl::Status why = lost_.Wait().value_or(absl::OkStatus());
  EXPECT_THAT(why.message(), HasSubstr("gave no sign of life for 100ms"));
}

// Also checks that Tick does not ask for the memory, which only status does.
TEST_F(WorkerSupervisorTest, ChecksWorkersPeriodically) {
  Begin("");
  const auto worker = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(worker.ok()) << worker.status();
  for (std::uint64_t pings = 0; pings < 3; ++pings) {
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(supervisor_->Tick());
    EXPECT_EQ(supervisor_->Workers(absl::Seconds(20))[0].memory.free_bytes(), pings);
    clock_.Advance(kCheckIntervalNs);
  }
}

TEST_F(WorkerSupervisorTest, ShutsDownWorkersThatCallersStillHold) {
  Begin("");
  const auto worker = Ensure({"a", "GPU-1"});
  ASSERT_TRUE(worker.ok());
  supervisor_->Shutdown();
  EXPECT_TRUE((*worker)->HasEnded());
  EXPECT_TRUE(supervisor_->Workers().empty());
}

TEST_F(WorkerSupervisorTest, ProbeFindsGpus) {
  Begin("");
  Event found;
  supervisor_->Probe(
      [&](const absl::StatusOr<worker::Started>& started) { found.Set(started.status()); });
  EXPECT_EQ(found.Wait(), absl::OkStatus());
  EXPECT_TRUE(supervisor_->Workers().empty());
}

TEST_F(WorkerSupervisorTest, StartsNoWorkerIfTheDaemonUsesNoGpus) {
  Begin("", absl::Seconds(20), "none");
  absl::Status found;
  supervisor_->Probe([&found](const auto& result) { found = result.status(); });
  for (const absl::Status& status : {found, Ensure({"a", "GPU-1"}).status()}) {
    EXPECT_EQ(ReasonOf(status), "CUDA_DRIVER_MISSING");
    EXPECT_THAT(std::string(status.message()), HasSubstr("cuda_library is 'none'"));
  }
  EXPECT_TRUE(supervisor_->Workers().empty());
}

TEST_F(WorkerSupervisorTest, ShutsDownDuringAProbe) {
  Begin("never starts");
  supervisor_->Probe([](const auto&) { ADD_FAILURE() << "called after Shutdown"; });
  supervisor_->Shutdown();
  EXPECT_EQ(ReasonOf(Ensure({"a", "GPU-1"}).status()), "DRAINING");
}

TEST(RestartPolicy, RepeatsARefusalForASecond) {
  RestartPolicy policy;
  const absl::Status why = absl::FailedPreconditionError("EXCLUSIVE");
  for (std::uint64_t now_ns = 1000 * kSecondNs; now_ns < 1010 * kSecondNs; now_ns += kSecondNs) {
    ASSERT_TRUE(policy.MayStart(now_ns).ok());
    policy.Refused(now_ns, why);
    EXPECT_EQ(policy.MayStart(now_ns), why);
    EXPECT_EQ(policy.MayStart(now_ns + kSecondNs - 1), why);
  }
  EXPECT_EQ(policy.failures(), 0u);
  policy.Failed(1010 * kSecondNs, absl::UnavailableError("x"));
  EXPECT_TRUE(policy.MayStart(1010 * kSecondNs).ok()) << "the first failure causes no pause";
}

TEST(RestartPolicy, WaitsLongerAfterEachFailure) {
  RestartPolicy policy;
  std::uint64_t now_ns = 1000 * kSecondNs;
  EXPECT_TRUE(policy.MayStart(now_ns).ok());
  policy.Failed(now_ns, absl::UnavailableError("x"));
  EXPECT_TRUE(policy.MayStart(now_ns).ok());
  for (const std::uint64_t pause : {1, 2, 4, 8, 16, 32, 60, 60}) {
    policy.Failed(now_ns, absl::UnavailableError("x"));
    EXPECT_FALSE(policy.MayStart(now_ns + pause * kSecondNs - 1).ok()) << pause;
    now_ns += pause * kSecondNs;
    EXPECT_TRUE(policy.MayStart(now_ns).ok()) << pause;
  }
  // After five minutes of work a worker counts as healthy.
  policy.Started(now_ns);
  now_ns += 300 * kSecondNs;
  policy.Failed(now_ns, absl::UnavailableError("x"));
  EXPECT_EQ(policy.failures(), 1u);
  EXPECT_TRUE(policy.MayStart(now_ns).ok());
}

}  // namespace
}  // namespace gradsync::daemon
