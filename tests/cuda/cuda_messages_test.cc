// Kills each daemon and each worker at each message about GPUs between two nodes. Every rank must
// see an outcome that a model allows, and the next generation must work. Above all: if a step is
// void for any host, then it must not be complete for any host or GPU.
//
// Rank 0 is on alpha, the coordinator. Rank 1 is on beta, whose messages go through a proxy. The
// messages are those of one life of the job. In every life two workers die: alpha's worker between
// two generations, so that beta's worker is asked for the communicator's id; and alpha's next
// worker in an all-reduce, so that beta's worker is released.
//
// Here trainers are threads. Other tests kill trainers: between two nodes, node_commit_test at each
// message that is not about GPUs, and cuda_nodes_test in steps on GPUs; on one node,
// cuda_death_test at each message about GPUs.

#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/include/gradsync/client.h"
#include "tests/client/job_of_threads.h"
#include "tests/cuda/cuda_two_nodes.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/fault/peer_proxy.h"
#include "tests/kit/test_daemon.h"

namespace gradsync {
namespace {

using fakes::MachineWithGpus;
using fault::PeerProxy;
using fault::WirePoint;
using testing::AnyOf;
using testing::Contains;
using testing::Each;
using testing::IsEmpty;

constexpr std::uint32_t kWorld = 2;

struct Kind {
  const char* name;
  int count;
  bool from_beta;
};

// All messages about GPUs in a life in which nothing else is killed.
constexpr Kind kKinds[] = {
    {"gpu_arena_mapped", 2, true},
    {"worker_call.connect", 2, false},
    {"worker_reply.connected", 2, true},
    {"worker_call.await_ready", 2 * kBuckets + 2, false},
    {"worker_call.launch", 2 * kBuckets + 1, false},
    {"worker_reply.launch_done", 2 * kBuckets, true},
    {"worker_call.give_up_step", 1, false},
    {"worker_call.disconnect", 1, false},
    {"worker_call.new_nccl_id", 1, false},
    {"worker_reply.nccl_id", 1, true},
    {"worker_release", 1, false},
    {"worker_ended", 1, true},
    // Replies without content: to AwaitReady, GiveUpStep and Disconnect, and to the last launch,
    // which fails.
    {"worker_reply", 2 * kBuckets + 5, true},
};
// Rank 1's steps in that life, except the one that it abandons.
constexpr int kEndStepsOfRank1 = 3;
int CountOf(const std::string& kind) {
  return std::find_if(std::begin(kKinds), std::end(kKinds),
                      [&](const Kind& one) { return kind == one.name; })
      ->count;
}

enum class Party { kAlpha, kBeta, kAlphasWorker, kBetasWorker };
constexpr Party kParties[] = {Party::kAlpha, Party::kBeta, Party::kAlphasWorker,
                              Party::kBetasWorker};
const char* const kPartyNames[] = {"Alpha", "Beta", "AlphasWorker", "BetasWorker"};
const char* NameOf(Party party) { return kPartyNames[static_cast<int>(party)]; }

// ---- The life

// What a rank has seen of a step.
struct Sight {
  absl::Status status = absl::UnknownError("no result");
  std::uint64_t followed = 0;  // the step for whose end the rank's stream waits; 0: none

  std::string reason() const { return status.ok() ? "OK" : ErrorReason(status); }
};

class Life {
 public:
  // Holds the message at `point` and calls `strike`, which must release it.
  Life(std::optional<WirePoint> point, std::function<void(Life*)> strike)
      : proxy_(job_.coordinator(), std::move(point)), strike_(std::move(strike)) {}

  // Kills the daemons. Stopping one that connects to a lost node would take until the engine's
  // limit.
  ~Life() {
    job_.End();
    for (const int node : {0, 1}) job_.node(node).Kill();
  }
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;

  GpuNodes& job() { return job_; }
  PeerProxy& proxy() { return proxy_; }
  const Sight& sight(std::uint32_t rank) const { return sights_[rank]; }
  // True if the rank's stream has seen the verdict that the step is complete. It is final.
  bool SeenComplete(std::uint32_t rank) {
    const std::uint64_t step = sights_[rank].followed;
    return step > 0 && job_.rank(rank).Verdict(step) == 0;
  }

  // Each of these functions returns true if the message was held during the call.

  // Joins both ranks and runs a generation's first step.
  bool Begin() {
    rank0_has_joined_ = std::promise<void>();
    return Run([this](std::uint32_t rank) {
      SessionOptions options = job_.Options(rank);
      if (rank == 1) options.coordinator = proxy_.address();
      absl::Status status = job_.rank(rank).OpenSession(options);
      if (rank == 0) rank0_has_joined_.set_value();
      if (status.ok()) status = job_.rank(rank).Register();
      return status.ok() ? Step(rank, 1) : status;
    });
  }
  // Rank 1 abandons step 2 while its worker waits for gradients that never arrive.
  bool Abandon() {
    fakes::Word word;
    CUDA_OK(
        cuStreamWaitValue64(job_.rank(1).stream(), word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
    const bool held = Run([&](std::uint32_t rank) {
      if (rank == 0) return Step(rank, 2);
      absl::Status status = job_.rank(rank).Mark(2, 0, 1);
      proxy_.AwaitPassed({{"worker_call.await_ready", kBuckets + 1}});
      if (status.ok()) status = job_.rank(rank).layout().AbandonStep(2, "out of memory");
      return status.ok() ? job_.rank(rank).Wait(2) : status;
    });
    word.Store(1);
    // The last replies may come after both ranks have their results.
    return held || HeldBy("worker_reply", kBuckets + 1) || HeldBy("worker_reply", kBuckets + 2);
  }
  // Alpha's worker dies in an all-reduce of step 2.
  bool LoseWorkerInAllReduce() {
    job_.machine().Inject(absl::StrCat("ncclAllReduce 1 kill pid=", Worker(0)));
    const bool held = Run([this](std::uint32_t rank) {
      if (rank == 1) return Step(rank, 2);
      // So rank 1 has ended its step before a message of this step is held.
      proxy_.AwaitPassed({{"rank_request.end_step", kEndStepsOfRank1}});
      const absl::Status marked = job_.rank(rank).Mark(2, 0, 1);
      return marked.ok() ? job_.rank(rank).Wait(2) : marked;
    });
    return held || HeldBy("worker_release", 1) || HeldBy("worker_reply", CountOf("worker_reply")) ||
           HeldBy("worker_ended", 1);
  }

  // Rank 1 may join and map its arena before rank 0 joins. If something were killed before rank 0
  // joins, rank 0 would fail only after its connect_timeout: it connects to alpha, which is lost,
  // or is alone in a new generation. Call this once in a generation.
  void AwaitRank0HasJoined() {
    const auto joined = rank0_has_joined_.get_future().wait_for(absl::ToChronoSeconds(kPatience));
    EXPECT_EQ(joined, std::future_status::ready);
  }

  // Waits until the node's worker runs, and returns its pid.
  pid_t Worker(int node) {
    pid_t pid = -1;
    EXPECT_TRUE(job_.node(node).AwaitStatus([&](const v1::GetStatusResponse& now) {
      for (const v1::WorkerStatus& worker : now.cuda().workers()) {
        if (worker.state() == v1::WORKER_STATE_RUNNING) pid = worker.pid();
      }
      return pid > 0;
    })) << "the node has no worker";
    return pid;
  }
  // Kills the worker. Returns when its daemon knows that it is lost.
  void KillWorker(int node) {
    const pid_t killed = Worker(node);
    ASSERT_GT(killed, 0);
    kill(killed, SIGKILL);
    EXPECT_TRUE(job_.node(node).AwaitStatus([&](const v1::GetStatusResponse& now) {
      const auto& workers = now.cuda().workers();
      return std::none_of(workers.begin(), workers.end(),
                          [&](const auto& worker) { return worker.pid() == killed; });
    }));
  }

 private:
  absl::Status Step(std::uint32_t rank, std::uint64_t step) {
    absl::Status status = job_.rank(rank).Step(step, static_cast<float>(rank));
    if (!status.ok()) return status;
    sights_[rank].followed = step;
    status = job_.rank(rank).Wait(step);
    for (std::size_t bucket = 0; status.ok() && bucket < kBuckets; ++bucket) {
      EXPECT_THAT(job_.rank(rank).Read(bucket), Each(0.5f + static_cast<float>(bucket)));
    }
    return status;
  }
  // Runs both ranks, each on a thread of its own.
  bool Run(const std::function<absl::Status(std::uint32_t rank)>& body) {
    sights_ = {};
    std::atomic<std::uint32_t> running{kWorld};
    std::thread ranks([&] {
      OnEveryRank(kWorld, [&](std::uint32_t rank) {
        sights_[rank].status = body(rank);
        --running;
        proxy_.Wake();
      });
    });
    const bool held = proxy_.AwaitHeld([&] { return running == 0; });
    if (held) strike_(this);
    ranks.join();
    return held;
  }
  // True if the `count`-th message of `kind` is held. No earlier message may be held.
  bool HeldBy(const std::string& kind, int count) {
    proxy_.AwaitPassed({{kind, count}});
    const bool held = proxy_.AwaitHeld([] { return true; });
    if (held) strike_(this);
    return held;
  }

  GpuNodes job_{{{0, 0}, {1, 1}}};
  PeerProxy proxy_;
  const std::function<void(Life*)> strike_;
  std::promise<void> rank0_has_joined_;  // in this generation
  std::array<Sight, kWorld> sights_;
};

// ---- Every message

struct WireCase {
  WirePoint point;
  Party killed = Party::kAlpha;
  // True if messages of the killed daemon that are on the wire still arrive.
  bool deliver = true;
};
std::ostream& operator<<(std::ostream& out, const WireCase& one) {
  return out << NameOf(one.killed) << " killed at " << one.point.kind << " " << one.point.ordinal
             << (one.deliver ? "" : ", which is lost");
}

// True if the party lives when the message is sent and is not about to die without the test.
bool Lives(Party party, const WirePoint& point) {
  const bool last = point.ordinal == CountOf(point.kind);
  const bool last_reply = point.kind == "worker_reply" && last;
  const bool last_launch = point.kind == "worker_call.launch" && last;
  switch (party) {
    case Party::kAlpha:
    case Party::kBeta:
      return true;
    case Party::kAlphasWorker:
      return !last_launch && !last_reply && point.kind != "worker_release" &&
             point.kind != "worker_ended";
    case Party::kBetasWorker:
      return !last_reply && point.kind != "worker_ended";
  }
  return false;
}

std::vector<WireCase> WireCases() {
  std::vector<WireCase> cases;
  for (const Kind& kind : kKinds) {
    for (int ordinal = 1; ordinal <= kind.count; ++ordinal) {
      const WirePoint point{kind.name, ordinal};
      for (const Party killed : kParties) {
        if (!Lives(killed, point)) continue;
        cases.push_back({point, killed, true});
        const bool sender = killed == (kind.from_beta ? Party::kBeta : Party::kAlpha);
        if (sender) cases.push_back({point, killed, false});
      }
    }
  }
  return cases;
}

// ---- The model

enum class Phase {
  kFirstStep,
  kAbandonedStep,
  kNextFirstStep,  // of the next generation
  kLostStep,       // alpha's worker dies in it in every life
  kNever,
};

using Outcomes = std::set<std::string>;  // reasons of errors, or "OK" for a complete step

// The outcomes that a rank may see.
Outcomes Allowed(Phase phase, const WireCase& one, std::uint32_t rank) {
  const bool agreeing = one.point.kind == "gpu_arena_mapped";
  // All that the step needs from beta may be on the wire behind the held message.
  const bool answering = one.point.kind == "worker_reply.launch_done" && one.deliver;
  // True if all buckets may be launched, perhaps just before the daemons know of the death. If no
  // GPU has launched a bucket, the step is never in doubt.
  const bool gated = one.point.kind == "worker_reply" && one.deliver;
  const bool launched = (phase == Phase::kFirstStep || phase == Phase::kNextFirstStep) &&
                        (gated || one.point.kind == "worker_call.launch" ||
                         one.point.kind == "worker_reply.launch_done");
  // `ended`: the rank has certainly ended its step when the party is killed. `not_ended`: it
  // certainly has not.
  const bool ended = phase == Phase::kLostStep && rank == 1;
  const bool not_ended =
      agreeing || (phase >= Phase::kAbandonedStep && phase != Phase::kNextFirstStep &&
                   rank == (phase == Phase::kAbandonedStep ? 1u : 0u));
  Outcomes allowed;
  const auto lost_daemon = [&](const char* reason) {
    if (!ended) allowed.insert(reason);
    if (!not_ended) allowed.insert("STEP_IN_DOUBT");
  };
  // The session of the worker's own rank ends with WORKER_LOST. The other rank sees RANK_LOST, or
  // WORKER_LOST if a call to the worker fails first. That is possible while the ranks agree on a
  // layout too: the held message may complete the agreement before the worker's daemon ends the
  // session.
  const auto lost_worker = [&](std::uint32_t worker_of) {
    allowed.insert("WORKER_LOST");
    if (rank != worker_of) allowed.insert("RANK_LOST");
    // Rank 0's arena may not be allocated yet. The held message says that rank 1's is.
    if (agreeing && worker_of == 0 && rank == 1) allowed.insert("LAYOUT_REFUSED");
    if (launched) allowed.insert("STEP_IN_DOUBT");
  };
  switch (one.killed) {
    case Party::kAlpha:
      lost_daemon(rank == 0 ? "DAEMON_LOST" : "COORDINATOR_LOST");
      break;
    case Party::kBeta:
      if (rank == 1) lost_daemon("DAEMON_LOST");
      // If rank 0's own worker has a launch, alpha may kill it because beta is lost. The engine's
      // connection to beta breaks before the stream through the proxy does. If the stream follows
      // more than 500 ms later (kStreamEndPatienceNs), alpha reports the engine's failure.
      if (rank == 0) allowed.insert({"RANK_LOST", "NODE_LOST", "ENGINE_PEER_LOST"});
      if (rank == 0 && launched) allowed.insert("STEP_IN_DOUBT");
      if (rank == 0 && answering) allowed.insert("OK");
      break;
    case Party::kAlphasWorker:
      lost_worker(0);
      if (answering) allowed.insert("OK");
      break;
    case Party::kBetasWorker:
      lost_worker(1);
      if (answering) allowed.insert("OK");
      break;
  }
  if (phase == Phase::kAbandonedStep) {
    allowed.erase("OK");
    allowed.insert("STEP_ABANDONED");
  }
  if (phase == Phase::kLostStep) lost_worker(0);
  return allowed;
}

class EveryGpuMessageTest : public testing::TestWithParam<WireCase> {
 protected:
  static void Strike(Life* life) {
    const WireCase& one = GetParam();
    life->AwaitRank0HasJoined();
    switch (one.killed) {
      case Party::kAlpha:
      case Party::kBeta:
        life->job().node(one.killed == Party::kAlpha ? 0 : 1).Kill();
        break;
      case Party::kAlphasWorker:
      case Party::kBetasWorker:
        life->KillWorker(one.killed == Party::kAlphasWorker ? 0 : 1);
        break;
    }
    life->proxy().Release(one.deliver);
  }
  static Phase Live(Life* life) {
    if (life->Begin()) return Phase::kFirstStep;
    if (life->Abandon()) return Phase::kAbandonedStep;
    life->job().End();
    life->KillWorker(0);
    if (life->Begin()) return Phase::kNextFirstStep;
    if (life->LoseWorkerInAllReduce()) return Phase::kLostStep;
    return Phase::kNever;
  }
  static void Check(Life* life, Phase phase) {
    const WireCase& one = GetParam();
    bool complete = false, is_void = false;
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      const Sight& sight = life->sight(rank);
      const bool seen_complete = life->SeenComplete(rank);
      const std::string reason = sight.reason();
      EXPECT_THAT(Allowed(phase, one, rank), Contains(reason))
          << "rank " << rank << ": " << sight.status;
      const bool in_doubt = reason == "STEP_IN_DOUBT";
      complete = complete || sight.status.ok() || seen_complete;
      is_void = is_void || (!sight.status.ok() && !in_doubt);
      EXPECT_TRUE(!sight.status.ok() || seen_complete) << "rank " << rank;
      if (reason == "RANK_LOST") {
        EXPECT_EQ(ErrorField(sight.status, field::kRank), absl::StrCat(1 - rank)) << sight.status;
      }
    }
    EXPECT_FALSE(complete && is_void) << "complete for one host or GPU, and void for another host";
  }
  // Expects that new trainers can join the daemons and workers that are left.
  static void ExpectNextGeneration(Life* life, Phase phase) {
    GpuNodes& job = life->job();
    job.End();
    // A worker that has died twice starts again only after a pause. New daemons have no such pause.
    const bool anew = phase >= Phase::kNextFirstStep;
    for (const int node : {0, 1}) {
      if (anew && job.node(node).process().running()) job.node(node).Kill();
      if (!job.node(node).process().running()) job.node(node).Start();
    }
    const bool moved = anew || GetParam().killed == Party::kAlpha;
    OnEveryRank(kWorld, [&](std::uint32_t rank) {
      SessionOptions options = job.Options(rank);
      if (rank == 1 && !moved) options.coordinator = life->proxy().address();
      const absl::Status joined = job.rank(rank).Join(options);
      ASSERT_TRUE(joined.ok()) << "rank " << rank << ": " << joined;
    });
    if (HasFailure()) return;
    job.AverageStep(1, 1);
    EXPECT_THAT(job.machine().Violations(), IsEmpty());
  }
};

TEST_P(EveryGpuMessageTest, LeavesTheStepCompleteOrVoidOnEveryRank) {
  if (!fakes::Isolated()) {
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    return fakes::RunIsolated(absl::StrCat(test->test_suite_name(), ".", test->name()),
                              MachineWithGpus(2));
  }
  Life life(GetParam().point, Strike);
  const Phase phase = Live(&life);
  ASSERT_NE(phase, Phase::kNever) << "the message was never sent";
  Check(&life, phase);
  ExpectNextGeneration(&life, phase);
}

std::string CaseName(const testing::TestParamInfo<WireCase>& info) {
  const WireCase& one = info.param;
  std::string name = absl::StrCat(NameOf(one.killed), "_", one.point.kind, "_", one.point.ordinal,
                                  one.deliver ? "" : "_lost");
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Wire, EveryGpuMessageTest, testing::ValuesIn(WireCases()), CaseName);

ISOLATED_TEST(GpuMessages, ListOfMessagesIsComplete, MachineWithGpus(2)) {
  Life life(std::nullopt, [](Life*) {});
  const auto expect = [&](const char* reason) {
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      EXPECT_EQ(life.sight(rank).reason(), reason) << life.sight(rank).status;
    }
  };
  life.Begin();
  expect("OK");
  life.Abandon();
  expect("STEP_ABANDONED");
  life.job().End();
  life.KillWorker(0);
  life.Begin();
  expect("OK");
  life.LoseWorkerInAllReduce();
  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    EXPECT_THAT(life.sight(rank).reason(), AnyOf("WORKER_LOST", "RANK_LOST"))
        << life.sight(rank).status;
  }
  // The last messages come after the ranks have their results.
  std::map<std::string, int> said;
  for (const auto& [kind, count] : life.proxy().AwaitPassed({{"worker_ended", 1}})) {
    if (kind.rfind("worker_", 0) == 0 || kind.rfind("gpu_", 0) == 0) said[kind] = count;
  }
  std::map<std::string, int> listed;
  for (const Kind& kind : kKinds) listed[kind.name] = kind.count;
  EXPECT_EQ(said, listed);
}

}  // namespace
}  // namespace gradsync
