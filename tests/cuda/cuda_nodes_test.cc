// Jobs with layouts on GPUs of two nodes: two real daemons with their workers, and the client
// library, on fakes of the driver and of NCCL. Most tests also run on a real machine with one GPU.

#include <cuda.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "tests/client/job_of_threads.h"
#include "tests/cuda/cuda_two_nodes.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/fault/peer_proxy.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync {
namespace {

using fakes::GpusThatMayBeOne;
using fakes::MachineDescription;
using fakes::MachineWithGpus;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

ISOLATED_TEST(GpuNodes, AverageOverOneGpuPerNode, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}});
  job.Join();
  for (std::uint64_t step = 1; step <= 5; ++step) {
    job.AverageStep(step, 10 * static_cast<float>(step));
  }
  job.ExpectConnections(2);
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// Some ranks share a GPU, and one node has more GPUs than the other.
ISOLATED_TEST(GpuNodes, MayHaveUnequalNumbersOfRanksAndGpus, MachineWithGpus(3)) {
  GpuNodes job({{0, 0}, {0, 1}, {0, 1}, {1, 2}, {1, 2}});
  job.Join();
  for (std::uint64_t step = 1; step <= 3; ++step) job.AverageStep(step, 1);
  job.ExpectConnections(3);
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(GpuNodes, MayHaveLayoutsInHostMemoryToo, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}, {1, 1}});
  job.Join();
  std::vector<std::unique_ptr<Layout>> host(job.world());
  OnEveryRank(job.world(), [&](std::uint32_t rank) {
    LayoutSpec spec = FloatBuckets(2, 5000);
    spec.name = "host";
    auto layout = job.rank(rank).session().RegisterLayout(spec);
    ASSERT_TRUE(layout.ok()) << layout.status();
    host[rank] = *std::move(layout);
  });
  for (std::uint64_t step = 1; step <= 3; ++step) {
    for (std::uint32_t rank = 0; rank < job.world(); ++rank) {
      Fill(host[rank]->bucket(1), static_cast<float>(rank));
      ASSERT_TRUE(MarkAllAndEnd(host[rank].get(), step).ok());
    }
    job.AverageStep(step, 4);
    OnEveryRank(job.world(), [&](std::uint32_t rank) {
      const auto complete = host[rank]->WaitStep(step, kPatience);
      EXPECT_TRUE(complete.ok()) << complete.status();
      EXPECT_EQ(ValueOf(host[rank]->bucket(1)), 1.0f);
      float value = static_cast<float>(rank);
      const absl::Status sent = job.rank(rank).session().Broadcast(&value, sizeof(value), 2);
      EXPECT_TRUE(sent.ok()) << sent;
      EXPECT_EQ(value, 2.0f);
    });
  }
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(GpuNodes, RunTwoStepsAtOnce, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}});
  job.Join();
  // Each rank is a step ahead once: its messages about the later step wait for the earlier one.
  for (const std::uint32_t ahead : {1u, 0u}) {
    const std::uint64_t step = ahead == 1 ? 1 : 3;
    for (const std::uint32_t rank : {ahead, 1 - ahead}) {
      ASSERT_TRUE(job.rank(rank).Step(step, 2).ok());
      ASSERT_TRUE(job.rank(rank).Step(step + 1, static_cast<float>(4 * rank)).ok());
    }
    for (std::uint32_t rank = 0; rank < job.world(); ++rank) {
      EXPECT_TRUE(job.rank(rank).Wait(step).ok());
    }
    // Its gradients were those of both.
    for (std::uint32_t rank = 0; rank < job.world(); ++rank) {
      EXPECT_THAT(job.rank(rank).Read(0), Each(2.0f));
      EXPECT_EQ(job.rank(rank).Verdict(step + 1), 0);
      EXPECT_TRUE(job.rank(rank).Wait(step + 1).ok());
    }
  }
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(GpuNodes, AbandonedStepIsVoidOnEveryNode, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}});
  job.Join();
  std::uint64_t step = 0;
  for (const std::uint32_t abandons : {0u, 1u}) {
    ++step;
    ASSERT_TRUE(job.rank(1 - abandons).Step(step, 1).ok());
    ASSERT_TRUE(job.rank(abandons).Mark(step, 0, 1).ok());
    ASSERT_TRUE(job.rank(abandons).layout().AbandonStep(step, "out of memory").ok());
    for (std::uint32_t rank = 0; rank < job.world(); ++rank) {
      const absl::Status is_void = job.rank(rank).Wait(step);
      EXPECT_EQ(ErrorReason(is_void), "STEP_ABANDONED") << is_void;
    }
    EXPECT_EQ(job.rank(1 - abandons).Verdict(step), 1);
    job.AverageStep(++step, 3);
  }
  job.ExpectConnections(2);
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// The node's GPU takes part with zeros, and the communicator stays.
ISOLATED_TEST(GpuNodes, NodeWithoutRanksContributesZeros, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}});
  job.Join();
  job.AverageStep(1, 1);
  for (const std::uint32_t stays : {0u, 1u}) {
    const std::uint64_t step = stays == 0 ? 2 : 4;
    std::thread leaves([&] { EXPECT_TRUE(job.rank(1 - stays).session().LeaveAndStay().ok()); });
    ASSERT_TRUE(job.rank(stays).Step(step, 8).ok());
    EXPECT_THAT(job.rank(stays).Read(1), Each(9.0f));
    const auto alone = job.rank(stays).layout().WaitStep(step, kPatience);
    ASSERT_TRUE(alone.ok()) << alone.status();
    EXPECT_EQ(alone->live_ranks, 1u);
    EXPECT_TRUE(job.rank(stays).session().LeaveAndStay().ok());
    leaves.join();
    job.AverageStep(step + 1, 1);
  }
  job.ExpectConnections(2);
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// ---- Losses

// A trainer that finishes step 1 and writes to descriptor 3 within step 2: it has marked a bucket
// ready whose gradients never arrive.
ROLE(victim) {
  const auto number = [](const char* name) {
    return static_cast<std::uint32_t>(std::stoul(getenv(name)));
  };
  GpuRank rank(static_cast<int>(number("VICTIM_GPU")));
  const absl::Status joined =
      rank.Join(OptionsOf(getenv("VICTIM_SOCKET"), getenv("VICTIM_COORDINATOR"),
                          number("VICTIM_RANK"), number("VICTIM_WORLD")));
  EXPECT_TRUE(joined.ok()) << joined;
  EXPECT_TRUE(rank.Step(1, 0).ok());
  EXPECT_TRUE(rank.Wait(1).ok());
  // The stream never reaches the ready word.
  const fakes::Word never;
  CUDA_OK(cuStreamWaitValue64(rank.stream(), never.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  EXPECT_TRUE(rank.Mark(2, 0, 1).ok());
  EXPECT_EQ(write(3, "2", 1), 1);
  pause();
  return 1;
}

class Victim {
 public:
  Victim(GpuNodes* job, std::uint32_t rank, const Place& place) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    const Descriptor theirs(ends[1]);
    said_ = Descriptor(ends[0]);
    process_ = fakes::StartRole(
        "victim", {theirs.get()},
        {absl::StrCat("VICTIM_GPU=", place.gpu), absl::StrCat("VICTIM_RANK=", rank),
         absl::StrCat("VICTIM_WORLD=", job->world()),
         absl::StrCat("VICTIM_SOCKET=", job->node(place.node).socket()),
         absl::StrCat("VICTIM_COORDINATOR=", job->coordinator())});
  }
  bool AwaitStep2() const { return AwaitReadable(said_.get(), kPatienceMs); }
  void Kill() { process_->Kill(); }

 private:
  Descriptor said_;
  std::unique_ptr<ChildProcess> process_;
};

ISOLATED_TEST(GpuNodes, KeepOneCommunicatorOverGenerations, GpusThatMayBeOne(2)) {
  const std::vector<Place> places = {{0, 0}, {0, 0}, {1, 1}, {1, 1}};
  GpuNodes job(places);
  for (const int dies : {2, 0, 3, 1, 2}) {
    Victim victim(&job, static_cast<std::uint32_t>(dies), places[static_cast<std::size_t>(dies)]);
    job.Join(dies);
    for (std::uint64_t step : {1, 2}) {
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == dies) continue;
        const absl::Status stepped = job.rank(static_cast<std::uint32_t>(rank)).Step(step, 4);
        EXPECT_TRUE(stepped.ok()) << stepped;
      }
      if (step == 2) break;
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == dies) continue;
        EXPECT_THAT(job.rank(static_cast<std::uint32_t>(rank)).Read(1), Each(4.0f));
        EXPECT_TRUE(job.rank(static_cast<std::uint32_t>(rank)).Wait(1).ok());
      }
    }
    ASSERT_TRUE(victim.AwaitStep2());
    victim.Kill();
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == dies) continue;
      const absl::Status lost = job.rank(static_cast<std::uint32_t>(rank)).Wait(2);
      EXPECT_EQ(ErrorReason(lost), "RANK_LOST") << lost;
      EXPECT_THAT(std::string(lost.message()), HasSubstr(absl::StrCat("rank ", dies)));
      EXPECT_EQ(job.rank(static_cast<std::uint32_t>(rank)).Verdict(2), 1);
    }
    job.End();
  }
  job.ExpectConnections(2, "one for each GPU");
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// Expects the gate in the coordinator's status of the job.
void ExpectGate(const std::string& flag, const std::string& gate) {
  GpuNodes job({{0, 0}, {1, 1}}, flag);
  job.Join();
  EXPECT_EQ(job.node(0).Status().jobs(0).gate(), "") << "the GPUs have exchanged nothing yet";
  job.AverageStep(1, 1);
  EXPECT_EQ(job.node(0).Status().jobs(0).gate(), gate) << flag;
}

ISOLATED_TEST(GpuNodes, StatusShowsTheGate, GpusThatMayBeOne(2)) {
  ExpectGate("--gate=auto", "all_nodes");
  ExpectGate("--gate=none", "none");
}

fakes::MachineDescription MachineWithMps() {
  fakes::MachineDescription machine = MachineWithGpus(2);
  machine.mps = true;
  return machine;
}

ISOLATED_TEST(GpuNodes, StatusShowsGateNoneWithMps, MachineWithMps()) {
  ExpectGate("--gate=auto", "none");
}

// The pid of any worker of the daemon; -1 if it has none.
pid_t WorkerOf(const TestDaemon& daemon) {
  const std::string tasks = absl::StrCat("/proc/", daemon.pid(), "/task");
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    std::ifstream children(task.path() / "children");
    for (pid_t child = 0; children >> child;) {
      std::ifstream command(absl::StrCat("/proc/", child, "/cmdline"));
      std::string arguments;
      std::getline(command, arguments);  // fails if the worker ends meanwhile
      if (arguments.find("--worker") != std::string::npos) return child;
    }
  }
  return -1;
}

// The pid of the job's worker. It is not the one that may still be looking for GPUs.
pid_t RunningWorkerOf(const TestDaemon& daemon) {
  pid_t running = -1;
  EXPECT_TRUE(daemon.AwaitStatus([&running](const v1::GetStatusResponse& now) {
    for (const v1::WorkerStatus& worker : now.cuda().workers()) {
      if (worker.state() == v1::WORKER_STATE_RUNNING) running = worker.pid();
    }
    return running > 0;
  }));
  return running;
}

void KillWorkerOf(const TestDaemon& daemon) {
  const pid_t running = RunningWorkerOf(daemon);
  ASSERT_GT(running, 0);
  kill(running, SIGKILL);
}

bool AwaitNoWorker(const TestDaemon& daemon) {
  return daemon.AwaitStatus([&](const auto&) { return WorkerOf(daemon) < 0; });
}

ISOLATED_TEST(GpuNodes, StopIdleWorkers, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}}, "--worker_idle_limit=1ms");
  for (const std::uint64_t connections : {2u, 4u}) {
    job.Join();
    job.AverageStep(1, 1);
    job.End();
    job.ExpectConnections(connections);
    EXPECT_TRUE(AwaitNoWorker(job.node(0)));
    EXPECT_TRUE(AwaitNoWorker(job.node(1)));
  }
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// The job on one node has its own workers. Those of the job over both nodes stay connected.
ISOLATED_TEST(GpuNodes, JobOfTheSameNameRunsOnOneNodeToo, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}});
  job.Join();
  job.AverageStep(1, 1);
  job.End();
  GpuRank alone(1);
  ASSERT_TRUE(alone.Join(OptionsOf(job.node(1).socket(), "", 0, 1)).ok());
  ASSERT_TRUE(alone.Step(1, 7).ok());
  EXPECT_THAT(alone.Read(0), Each(7.0f));
  EXPECT_TRUE(alone.Wait(1).ok());
  alone.End();
  job.Join();
  job.AverageStep(1, 1);
  job.ExpectConnections(2);
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// Loses something while rank 1 has ended step 2 and rank 0 has not. Expects that the job fails on
// both ranks, and that the next generation makes a new communicator.
class Loss {
 public:
  using Expected = testing::Matcher<std::string>;

  GpuNodes& job() { return job_; }
  void Expect(const std::function<void()>& lose, const Expected& at_rank0,
              const Expected& at_rank1) {
    job_.Join();
    job_.AverageStep(1, 1);
    ASSERT_TRUE(job_.rank(0).Mark(2, 0, 1).ok());
    ASSERT_TRUE(job_.rank(1).Step(2, 1).ok());
    ASSERT_TRUE(job_.node(0).AwaitStatus([](const v1::GetStatusResponse& now) {
      const v1::JobStatus& job = now.jobs(0);
      return job.nodes_size() == 2 && job.nodes(0).waiting_ranks_size() == 1 &&
             job.nodes(1).waiting_ranks_size() == 0;
    })) << "rank 1's EndStep has not reached the coordinator";
    lose();
    EXPECT_THAT(Describe(job_.rank(0).Wait(2)), at_rank0);
    EXPECT_THAT(Describe(job_.rank(1).Wait(2)), at_rank1);
    EXPECT_EQ(job_.rank(1).Verdict(2), 1);
    job_.End();
    for (int node : {0, 1}) {
      if (!job_.node(node).process().running()) job_.node(node).Start();
    }
    job_.Join();
    job_.AverageStep(1, 2);
    job_.End();
    job_.ExpectConnections(4);
  }

 private:
  static std::string Describe(const absl::Status& status) {
    return absl::StrCat(ErrorReason(status), ": ", status.message());
  }

  GpuNodes job_{{{0, 0}, {1, 1}}};
};

ISOLATED_TEST(GpuNodes, KilledWorkerOfTheCoordinatorFailsTheJob, GpusThatMayBeOne(2)) {
  Loss loss;
  const auto how = HasSubstr("worker process was killed by signal 9");
  loss.Expect([&] { KillWorkerOf(loss.job().node(0)); }, how, how);
}

ISOLATED_TEST(GpuNodes, KilledWorkerOfAnotherNodeFailsTheJob, GpusThatMayBeOne(2)) {
  Loss loss;
  const auto how = HasSubstr("worker process was killed by signal 9");
  loss.Expect([&] { KillWorkerOf(loss.job().node(1)); }, how, how);
}

// Alpha's kernel spins in NCCL, because rank 1's gradients are late. A real machine does not tell
// when the kernel starts; it starts long before the next answer to a question about the status.
void KillAWorkerDuringAnAllReduce(int dies) {
  GpuNodes job({{0, 0}, {1, 1}}, "--gate=none");
  job.Join();
  job.AverageStep(1, 1);
  const fakes::FakeMachine& machine = job.machine();
  const pid_t spins = RunningWorkerOf(job.node(0));
  const auto launches = [&] { return machine.fake() ? machine.Calls("ncclAllReduce", spins) : 0; };
  const std::uint64_t before = launches();
  job.rank(1).Enter();
  fakes::Word gradients;
  CUDA_OK(
      cuStreamWaitValue64(job.rank(1).stream(), gradients.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    ASSERT_TRUE(job.rank(1).Mark(2, bucket, 1).ok());
  }
  ASSERT_TRUE(job.rank(0).Step(2, 1).ok());
  ASSERT_TRUE(
      job.node(0).AwaitStatus([&](const auto&) { return !machine.fake() || launches() > before; }));
  KillWorkerOf(job.node(dies));
  for (const std::uint32_t rank : {0, 1}) {
    EXPECT_THAT(std::string(job.rank(rank).Wait(2).message()),
                HasSubstr("worker process was killed by signal 9"));
  }
  gradients.Store(1);
  EXPECT_EQ(job.rank(0).Verdict(2), 1);
  job.End();
  job.Join();
  job.AverageStep(1, 2);
  job.ExpectConnections(4);
}

ISOLATED_TEST(GpuNodes, WorkerKilledInItsAllReduceFailsTheJob, GpusThatMayBeOne(2)) {
  KillAWorkerDuringAnAllReduce(0);
}

ISOLATED_TEST(GpuNodes, WorkerThatAnAllReduceWaitsForFailsTheJob, GpusThatMayBeOne(2)) {
  KillAWorkerDuringAnAllReduce(1);
}

MachineDescription NodesWithSockets() {
  MachineDescription machine = GpusThatMayBeOne(2);
  machine.nccl_reports_lost_ranks = true;
  return machine;
}

// NCCL on alpha sees the loss before beta's daemon does. Still the ranks learn how beta's worker
// was lost.
ISOLATED_TEST(GpuNodes, LossThatNcclSeesFirstIsExplainedByItsDaemon, NodesWithSockets()) {
  KillAWorkerDuringAnAllReduce(1);
}

ISOLATED_TEST(GpuNodes, KilledDaemonOfAnotherNodeFailsTheJob, GpusThatMayBeOne(2)) {
  Loss loss;
  loss.Expect([&] { loss.job().node(1).Kill(); }, HasSubstr("node beta"),
              HasSubstr("STEP_IN_DOUBT"));
}

ISOLATED_TEST(GpuNodes, KilledCoordinatorFailsTheJob, GpusThatMayBeOne(2)) {
  Loss loss;
  loss.Expect([&] { loss.job().node(0).Kill(); }, HasSubstr("DAEMON_LOST"),
              HasSubstr("STEP_IN_DOUBT"));
}

// The ranks' streams have seen the verdict that a step is complete, and no rank has ended the step.
// Whatever is lost at that moment, no host may learn that the step is void.
class LossAfterTheVerdict {
 public:
  LossAfterTheVerdict() = default;
  // Kills the daemons. Stopping one that connects to a lost node would take until the engine's
  // limit.
  ~LossAfterTheVerdict() {
    job_.End();
    for (const int node : {0, 1}) job_.node(node).Kill();
  }
  LossAfterTheVerdict(const LossAfterTheVerdict&) = delete;
  LossAfterTheVerdict& operator=(const LossAfterTheVerdict&) = delete;

  GpuNodes& job() { return job_; }
  // The proxy between the two daemons. It holds beta's RankEnded message.
  fault::PeerProxy& proxy() { return proxy_; }
  void Expect(const std::function<void()>& lose, const std::set<std::string>& at_rank0) {
    OnEveryRank(2, [this](std::uint32_t rank) {
      SessionOptions options = job_.Options(rank);
      if (rank == 1) options.coordinator = proxy_.address();
      const absl::Status joined = job_.rank(rank).Join(options);
      ASSERT_TRUE(joined.ok()) << "rank " << rank << ": " << joined;
    });
    for (std::uint32_t rank : {0, 1}) {
      for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
        ASSERT_TRUE(job_.rank(rank).Mark(1, bucket, 1).ok());
      }
      ASSERT_TRUE(job_.rank(rank).layout().WaitOnStream(1, job_.rank(rank).stream()).ok());
    }
    for (std::uint32_t rank : {0, 1}) EXPECT_EQ(job_.rank(rank).Verdict(1), 0);
    lose();
    const absl::Status at_beta = job_.rank(1).Wait(1);
    EXPECT_EQ(ErrorReason(at_beta), "STEP_IN_DOUBT") << at_beta;
    const absl::Status at_alpha = job_.rank(0).Wait(1);
    EXPECT_THAT(at_rank0, Contains(at_alpha.ok() ? "OK" : ErrorReason(at_alpha))) << at_alpha;
  }

 private:
  GpuNodes job_{{{0, 0}, {1, 1}}};
  fault::PeerProxy proxy_{job_.coordinator(), fault::WirePoint{"rank_ended", 1}};
};

ISOLATED_TEST(GpuNodes, CoordinatorsDeathAfterTheVerdictPutsTheStepInDoubt, GpusThatMayBeOne(2)) {
  LossAfterTheVerdict loss;
  loss.Expect([&] { loss.job().node(0).Kill(); }, {"STEP_IN_DOUBT"});
}

// OK is possible too, if all replies of the daemon were on the wire.
ISOLATED_TEST(GpuNodes, DaemonsDeathAfterTheVerdictPutsTheStepInDoubt, GpusThatMayBeOne(2)) {
  LossAfterTheVerdict loss;
  loss.Expect([&] { loss.job().node(1).Kill(); }, {"STEP_IN_DOUBT", "OK"});
}

// Beta learns that its worker is lost before it learns that the coordinator is lost. The
// coordinator may know that the step is complete.
ISOLATED_TEST(GpuNodes, WorkersAndCoordinatorsDeathPutsTheStepInDoubt, GpusThatMayBeOne(2)) {
  LossAfterTheVerdict loss;
  loss.Expect(
      [&] {
        KillWorkerOf(loss.job().node(1));
        EXPECT_TRUE(loss.proxy().AwaitHeld([] { return false; }));
        loss.job().node(0).Kill();
        loss.proxy().Release(/*deliver=*/false);
      },
      {"STEP_IN_DOUBT"});
}

}  // namespace
}  // namespace gradsync
