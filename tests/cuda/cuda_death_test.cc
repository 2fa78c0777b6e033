// Trainers on GPUs die at every point of the hand-off. A rank of this process continues, or gets an
// error that names the lost rank. The daemon keeps nothing of the lost trainer, and it keeps the
// communicator. Other tests kill workers.

#include <gmock/gmock.h>
#include <signal.h>
#include <stdlib.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/include/gradsync/client.h"
#include "tests/cuda/cuda_node.h"
#include "tests/cuda/cuda_rank.h"
#include "tests/cuda/cuda_raw_rank.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/child_process.h"

namespace gradsync {
namespace {

using fakes::MachineWithGpus;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;

constexpr std::uint32_t kRanks = 2;
// The gradients of rank 0 and rank 1 in bucket 0. In each next bucket they are larger by one. A raw
// rank writes none.
constexpr float kMine = 4;
constexpr float kOther = 6;

// ---- Rank 1 is a process of its own. Its environment says where it connects and when it dies.

constexpr char kSocket[] = "GRADSYNC_TEST_SOCKET";
constexpr char kSideSocket[] = "GRADSYNC_TEST_SIDE_SOCKET";
constexpr char kGpu[] = "GRADSYNC_TEST_GPU";
constexpr char kSteps[] = "GRADSYNC_TEST_STEPS";
constexpr char kDeath[] = "GRADSYNC_TEST_DEATH";  // it gets SIGKILL at this moment
constexpr char kBusy[] = "GRADSYNC_TEST_BUSY";    // its kernels never end
constexpr char kDrop[] = "GRADSYNC_TEST_DROP";    // it exits without a Leave

std::string Variable(const char* name) {
  const char* const value = getenv(name);
  return value == nullptr ? "" : value;
}

void At(const std::string& moment) {
  if (Variable(kDeath) == moment) raise(SIGKILL);
}
void At(const std::string& moment, std::uint64_t step) { At(moment + " " + std::to_string(step)); }

// It calls the driver only after Join, so that rank 1 is part of the job when it dies.
ROLE(trainer) {
  SessionOptions options;
  options.socket = Variable(kSocket);
  options.job_id = "job";
  options.rank = 1;
  options.world_size = kRanks;
  auto session = Session::Join(options);
  if (!session.ok()) return 1;
  At("joined");
  CudaRank rank(std::stoi(Variable(kGpu)), *std::move(session));
  if (!rank.Register(CudaLayout(rank.gpu(), CudaNode::kBuckets, CudaNode::kCount)).ok()) return 1;
  At("registered");
  if (!Variable(kBusy).empty()) {
    static const fakes::Word never;
    CUDA_OK(cuStreamWaitValue64(rank.stream(), never.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  }
  const std::uint64_t steps = std::stoul(Variable(kSteps));
  for (std::uint64_t step = 1; step <= steps; ++step) {
    for (std::size_t bucket = 0; bucket < CudaNode::kBuckets; ++bucket) {
      rank.Write(bucket, kOther + static_cast<float>(bucket));
      At("written", step);
      if (!rank.layout().MarkReady(step, bucket, {rank.stream()}).ok()) return 1;
      if (bucket == 0) At("marked one", step);
    }
    At("marked all", step);
    if (!rank.layout().EndStep(step).ok()) return 1;
    At("ended", step);
    if (!rank.layout().WaitOnStream(step, rank.stream()).ok()) return 1;
    At("parked", step);
    rank.Read(0);
    At("released", step);
    if (!rank.WaitStep(step).ok()) return 1;
    At("decided", step);
  }
  if (!Variable(kDrop).empty()) return 0;
  rank.DropLayout();
  return rank.Leave().ok() ? 0 : 1;
}

ROLE(raw_trainer) {
  CudaRawRank rank(Variable(kSocket), Variable(kSideSocket));
  const auto moment = [](bool ok, const char* name) {
    if (!ok) exit(1);
    At(name);
  };
  const auto write_ready = [&rank](std::size_t bucket) {
    rank.semaphore(bucket).ready.store(1);
    return true;
  };
  moment(rank.Open(1, kRanks), "opened");
  moment(rank.RequestLayout(fakes::GpuUuid(0), CudaNode::kBuckets, CudaNode::kCount), "requested");
  moment(rank.AwaitAssignment(), "assigned");
  moment(rank.ClaimMemory(), "claimed");
  moment(rank.SayMapped(), "said mapped");
  moment(rank.AwaitLayoutReady(), "layout ready");
  moment(write_ready(0), "wrote one word before it said so");
  moment(rank.SayReady(1, 0), "said one ready");
  moment(rank.SayReady(1, 1), "said all ready");
  moment(write_ready(1), "wrote all words");
  moment(rank.SayEnd(1), "said end");
  moment(rank.AwaitStep().has_value(), "step done");
  return 0;
}

// ---- Rank 0

struct Life {
  absl::Status end;  // rank 0's error; OK if rank 1 has left
  pid_t other;
};

// Takes part in steps until one fails or the other rank has left.
absl::Status LiveOn(CudaRank& rank, bool other_writes) {
  if (absl::Status status =
          rank.Register(CudaLayout(rank.gpu(), CudaNode::kBuckets, CudaNode::kCount));
      !status.ok()) {
    return status;
  }
  for (std::uint64_t step = 1;; ++step) {
    if (absl::Status status = rank.Step(step, kMine); !status.ok()) return status;
    const auto result = rank.WaitStep(step);
    if (result.ok() && result->live_ranks == 1) return absl::OkStatus();
    // The stream is released. If its verdict is complete, the averages are right.
    const bool complete = rank.Verdict(step) == 0;
    for (std::size_t bucket = 0; complete && bucket < CudaNode::kBuckets; ++bucket) {
      const auto more = static_cast<float>(bucket);
      EXPECT_THAT(rank.Read(bucket),
                  Each((kMine + more + (other_writes ? kOther + more : 0)) / kRanks));
    }
    EXPECT_EQ(complete, result.ok()) << result.status();
    if (!result.ok()) return result.status();
  }
}

// One generation of the job, in which rank 1 is a new process that takes part in `steps` steps.
Life Live(CudaNode& node, CudaRank& rank, const std::string& role, int gpu, int steps,
          std::vector<std::string> environment) {
  const auto add = [&environment](const char* name, const std::string& value) {
    environment.push_back(std::string(name) + "=" + value);
  };
  add(kSocket, node.daemon().socket());
  add(kSideSocket, node.daemon().side_socket());
  add(kGpu, std::to_string(gpu));
  add(kSteps, std::to_string(steps));
  const absl::Status joined = rank.Join(node.Options(0, kRanks));
  EXPECT_TRUE(joined.ok()) << joined;
  const auto other = fakes::StartRole(role, {}, std::move(environment));
  Life life{LiveOn(rank, role == "trainer"), other->pid()};
  if (life.end.ok()) {
    EXPECT_TRUE(rank.Leave().ok());
    EXPECT_TRUE(fakes::Succeeds(*other));
  }
  rank.End();
  return life;
}

void ExpectLost(const Life& life, const std::string& when) {
  EXPECT_EQ(ErrorReason(life.end), "RANK_LOST") << when << ": " << life.end;
  EXPECT_EQ(ErrorField(life.end, field::kRank), "1") << when << ": " << life.end;
}

std::string Dies(const std::string& moment) { return std::string(kDeath) + "=" + moment; }

// Rank 1 dies in a step, while its stream is parked, after its averages, and between steps, or
// exits without Leave. After every five deaths, one trainer leaves.
ISOLATED_TEST(CudaDeath, CommunicatorOutlivesFiftyTrainers, MachineWithGpus(2)) {
  CudaNode node(2);
  CudaRank rank(0);
  const std::vector<std::string> deaths = {Dies("marked one 2"), Dies("parked 2"),
                                           Dies("released 1"), Dies("decided 1"),
                                           std::string(kDrop) + "=1"};
  for (int round = 0; round < 10; ++round) {
    for (const std::string& death : deaths) {
      ExpectLost(Live(node, rank, "trainer", 1, 2, {death}), death);
    }
    const Life left = Live(node, rank, "trainer", 1, 2, {});
    EXPECT_TRUE(left.end.ok()) << left.end;
  }
  node.ExpectNothingKept();
  if (node.machine().fake()) {
    EXPECT_EQ(node.machine().Calls("ncclCommInitRankConfig"), 2u) << "one for each GPU";
  }
  EXPECT_EQ(node.Workers(), 2u);
}

ISOLATED_TEST(CudaDeath, TrainerDiesAtEveryMomentOfItsSteps, MachineWithGpus(1)) {
  CudaNode node;
  CudaRank rank(0);
  for (const char* moment : {"joined", "registered", "written 1", "marked one 1", "marked all 1",
                             "ended 1", "parked 1", "released 1", "decided 1", "parked 2"}) {
    ExpectLost(Live(node, rank, "trainer", 0, 2, {Dies(moment)}), moment);
    node.ExpectNothingKept();
  }
  EXPECT_TRUE(Live(node, rank, "trainer", 0, 2, {}).end.ok());
  node.ExpectNothingKept();
  EXPECT_EQ(node.Workers(), 1u);
}

// These are all the calls by which a trainer's process uses the GPU and its memory. When it dies,
// the operations that it has enqueued may be done or not.
ISOLATED_TEST(CudaDeath, TrainerDiesAtEveryDriverCall, MachineWithGpus(1)) {
  CudaNode node;
  CudaRank rank(0);
  const Life whole = Live(node, rank, "trainer", 0, 1, {});
  EXPECT_TRUE(whole.end.ok()) << whole.end;
  int deaths = 0;
  for (const char* call : {"cuDevicePrimaryCtxRetain",
                           "cuMemImportFromShareableHandle",
                           "cuMemAddressReserve",
                           "cuMemMap",
                           "cuMemSetAccess",
                           "cuMemRelease",
                           "cuEventCreate",
                           "cuMemHostRegister_v2",
                           "cuMemHostGetDevicePointer_v2",
                           "cuStreamIsCapturing",
                           "cuMemsetD32Async",
                           "cuEventRecord",
                           "cuStreamWriteValue64_v2",
                           "cuStreamWaitEvent",
                           "cuStreamWaitValue64_v2",
                           "cuMemcpyDtoHAsync_v2",
                           "cuCtxSynchronize",
                           "cuMemHostUnregister",
                           "cuEventDestroy_v2",
                           "cuMemUnmap",
                           "cuMemAddressFree"}) {
    const std::uint64_t calls = node.machine().Calls(call, whole.other);
    // A trainer that is late finds the done words written, so it does not wait.
    const bool may_be_spared = std::string(call) == "cuStreamWaitValue64_v2";
    EXPECT_TRUE(calls > 0 || may_be_spared) << call;
    for (std::uint64_t n = 1; n <= calls; ++n, ++deaths) {
      const std::string fault = std::string(call) + " " + std::to_string(n) + " kill";
      const Life life = Live(node, rank, "trainer", 0, 1, {"GRADSYNC_FAKE_CUDA_FAULTS=" + fault});
      if (life.end.ok() && may_be_spared) {
        EXPECT_LT(node.machine().Calls(call, life.other), n) << fault;
      } else {
        ExpectLost(life, fault);
      }
      node.ExpectNothingKept();
    }
  }
  EXPECT_GT(deaths, 30);
  EXPECT_TRUE(Live(node, rank, "trainer", 0, 1, {}).end.ok());
  EXPECT_EQ(node.Workers(), 1u);
}

ISOLATED_TEST(CudaDeath, TrainerDiesAtEveryMessage, MachineWithGpus(1)) {
  CudaNode node;
  CudaRank rank(0);
  for (const char* moment : {"opened", "requested", "assigned", "claimed", "said mapped",
                             "layout ready", "wrote one word before it said so", "said one ready",
                             "said all ready", "wrote all words", "said end", "step done"}) {
    ExpectLost(Live(node, rank, "raw_trainer", 0, 1, {Dies(moment)}), moment);
    node.ExpectNothingKept();
  }
  EXPECT_EQ(node.Workers(), 1u);
}

// The trainer's ready words are never written.
void DieWithKernelsThatNeverEnd(int gpus) {
  CudaNode node(gpus);
  CudaRank rank(0);
  for (int gpu = 0; gpu < gpus; ++gpu) {
    for (const char* moment : {"marked one 1", "parked 1"}) {
      ExpectLost(Live(node, rank, "trainer", gpu, 1, {Dies(moment), std::string(kBusy) + "=1"}),
                 moment);
      node.ExpectNothingKept();
    }
  }
  if (node.machine().fake()) {
    EXPECT_EQ(node.machine().Calls("ncclCommInitRankConfig"), gpus == 1 ? 0u : 2u);
  }
  EXPECT_EQ(node.Workers(), static_cast<std::uint64_t>(gpus));
}

ISOLATED_TEST(CudaDeath, TrainerOfOneGpuDiesWithKernelsThatNeverEnd, MachineWithGpus(1)) {
  DieWithKernelsThatNeverEnd(1);
}

// The dying trainer is on rank 0's GPU or on the other one.
ISOLATED_TEST(CudaDeath, TrainerDiesWithKernelsThatNeverEnd, MachineWithGpus(2)) {
  DieWithKernelsThatNeverEnd(2);
}

ISOLATED_TEST(CudaDeath, TrainerDiesWhileItsMemoryIsAllocated, MachineWithGpus(1)) {
  CudaNode node;
  CudaRank rank(0);
  ASSERT_TRUE(rank.Join(node.Options(0, kRanks)).ok());
  node.machine().Inject("cuMemCreate 1 hang");
  const auto other =
      fakes::StartRole("raw_trainer", {},
                       {std::string(kSocket) + "=" + node.daemon().socket(),
                        std::string(kSideSocket) + "=" + node.daemon().side_socket()});
  ASSERT_TRUE(node.machine().AwaitJournal(fakes::kFault, "cuMemCreate", kPatienceMs));
  other->Kill();
  ExpectLost({rank.Register(CudaLayout(0, CudaNode::kBuckets, CudaNode::kCount)), other->pid()},
             "allocating");
  node.machine().ClearFaults();
  rank.End();
  node.ExpectNothingKept();
}

// The other GPU's worker waits in an all-reduce that never finishes, without an error from NCCL.
// The daemon ends that worker at once, and the next trainers get new workers. A rank gets
// WORKER_LOST or RANK_LOST, depending on what the daemon notices first.
ISOLATED_TEST(CudaDeath, WorkersDeathEndsTheOtherGpusWorker, MachineWithGpus(2)) {
  CudaNode node(2);
  CudaRank first(0), second(1);
  const auto join = [&node](CudaRank& rank) {
    const absl::Status joined = rank.Join(node.Options(static_cast<std::uint32_t>(rank.gpu()), 2));
    EXPECT_TRUE(joined.ok()) << joined;
    return rank.Register(CudaLayout(rank.gpu(), CudaNode::kBuckets, CudaNode::kCount));
  };
  const auto join_both = [&] {
    std::thread other([&] { EXPECT_TRUE(join(second).ok()); });
    EXPECT_TRUE(join(first).ok());
    other.join();
  };
  join_both();
  const std::vector<pid_t> workers = node.WorkerPids();
  ASSERT_EQ(workers.size(), 2u);
  node.machine().Inject("ncclAllReduce 1 kill pid=" + std::to_string(workers[0]));
  const auto names_the_kill = HasSubstr("worker process was killed by signal 9");
  ASSERT_TRUE(first.Step(1, kMine).ok());
  // Its first mark starts the launch that kills the worker, so a later one may fail.
  const absl::Status stepped = second.Step(1, kMine);
  if (!stepped.ok()) {
    EXPECT_THAT(std::string(stepped.message()), names_the_kill);
  }
  for (CudaRank* rank : {&first, &second}) {
    const absl::Status why = rank->WaitStep(1).status();
    EXPECT_THAT(std::string(why.message()), names_the_kill);
    if (rank == &first || stepped.ok()) {
      EXPECT_EQ(rank->Verdict(1), 1);
    }
    rank->End();
  }
  join_both();
  for (CudaRank* rank : {&first, &second}) ASSERT_TRUE(rank->Step(1, kMine).ok());
  for (CudaRank* rank : {&first, &second}) {
    EXPECT_TRUE(rank->WaitStep(1).ok());
    EXPECT_THAT(rank->Read(0), Each(kMine));
  }
  EXPECT_EQ(node.Workers(), 4u);
  EXPECT_EQ(node.machine().Calls("ncclCommInitRankConfig"), 4u);
}

// Two jobs on one GPU and a job in host memory are in the middle of a step. Each has one rank.
ISOLATED_TEST(CudaDeath, WorkersDeathFailsItsJobAndNoOther, MachineWithGpus(1)) {
  CudaNode node;
  const auto options = [&node](const std::string& job) {
    SessionOptions of_job = node.Options(0, 1);
    of_job.job_id = job;
    return of_job;
  };
  CudaRank loser(0), other(0);
  for (CudaRank* rank : {&loser, &other}) {
    ASSERT_TRUE(rank->Join(options(rank == &loser ? "loser" : "other")).ok());
    ASSERT_TRUE(rank->Register(CudaLayout(0, CudaNode::kBuckets, CudaNode::kCount)).ok());
    rank->Write(0, kMine);
    ASSERT_TRUE(rank->layout().MarkReady(1, 0, {rank->stream()}).ok());
  }
  const auto session = Session::Join(options("host"));
  ASSERT_TRUE(session.ok()) << session.status();
  LayoutSpec spec = CudaLayout(0, CudaNode::kBuckets, CudaNode::kCount);
  spec.device.clear();
  const auto host = (*session)->RegisterLayout(spec);
  ASSERT_TRUE(host.ok()) << host.status();
  ASSERT_TRUE((*host)->MarkReady(1, 0).ok());

  kill(node.WorkerPids("loser").front(), SIGKILL);
  const absl::Status why = loser.WaitStep(1).status();
  EXPECT_EQ(ErrorReason(why), "WORKER_LOST") << why;
  EXPECT_THAT(std::string(why.message()), HasSubstr("worker process was killed by signal 9"));
  EXPECT_EQ(ErrorField(why, field::kJob), "loser") << why;

  for (const std::uint64_t step : {1, 2}) {
    for (std::size_t bucket = step == 1 ? 1 : 0; bucket < CudaNode::kBuckets; ++bucket) {
      other.Write(bucket, kMine);
      ASSERT_TRUE(other.layout().MarkReady(step, bucket, {other.stream()}).ok());
      ASSERT_TRUE((*host)->MarkReady(step, bucket).ok());
    }
    ASSERT_TRUE(other.layout().EndStep(step).ok());
    ASSERT_TRUE((*host)->EndStep(step).ok());
    const auto on_gpu = other.WaitStep(step);
    EXPECT_TRUE(on_gpu.ok()) << on_gpu.status();
    const auto in_host_memory = (*host)->WaitStep(step, kCudaPatience);
    EXPECT_TRUE(in_host_memory.ok()) << in_host_memory.status();
  }
  EXPECT_THAT(other.Read(1), Each(kMine));
}

// The streams have seen the verdict that the step is complete. One worker dies before it reports
// this to the daemon. So no host may learn that the step is void.
ISOLATED_TEST(CudaDeath, WorkersDeathAfterTheVerdictPutsTheStepInDoubt, MachineWithGpus(2)) {
  CudaNode node(2);
  CudaRank first(0), second(1);
  const auto join = [&node](CudaRank& rank) {
    EXPECT_TRUE(rank.Join(node.Options(static_cast<std::uint32_t>(rank.gpu()), 2)).ok());
    EXPECT_TRUE(rank.Register(CudaLayout(rank.gpu(), 1, CudaNode::kCount)).ok());
  };
  std::thread other([&] { join(second); });
  join(first);
  other.join();
  ASSERT_EQ(node.WorkerPids().size(), 2u);
  const pid_t worker = node.WorkerPids().front();
  // When the worker makes that call, all operations of the bucket are on the streams.
  node.machine().Inject("cuEventQuery 1 hang pid=" + std::to_string(worker));
  for (CudaRank* rank : {&first, &second}) ASSERT_TRUE(rank->Step(1, kMine).ok());
  for (CudaRank* rank : {&first, &second}) EXPECT_EQ(rank->Verdict(1), 0);
  kill(worker, SIGKILL);
  for (CudaRank* rank : {&first, &second}) {
    const absl::Status why = rank->WaitStep(1).status();
    EXPECT_EQ(ErrorReason(why), "STEP_IN_DOUBT") << why;
    EXPECT_THAT(std::string(why.message()), HasSubstr("worker process was killed by signal 9"));
    // The end of the session names the cause.
    const absl::Status end = rank->WaitStep(2).status();
    EXPECT_THAT(ErrorReason(end), AnyOf("WORKER_LOST", "RANK_LOST")) << end;
  }
}

}  // namespace
}  // namespace gradsync
