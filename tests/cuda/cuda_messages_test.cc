// Each daemon and each worker is killed at each message about GPUs between two nodes: what every
// rank sees is what a model allows, and the next generation trains on. Above all, a step is
// complete on no rank, for its host or for its GPU, if some host is told that it is void.
//
// Rank 0 is on alpha, which coordinates, rank 1 on beta, whose messages go through a proxy. The
// messages are those of one life of the job, which has two deaths of its own: alpha's worker
// between two generations, so that beta's is asked for the communicator's id; and its successor in
// an all-reduce, so that beta's is released.
//
// Trainers, which are threads here, are killed elsewhere: between two nodes at each message that is
// not about GPUs by node_commit_test and in steps on GPUs by cuda_nodes_test, on one node at each
// message about GPUs by cuda_death_test.

#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
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
#include "tests/client/daemon_process.h"
#include "tests/cuda/cuda_two_nodes.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/fault/peer_proxy.h"
#include "tests/fault/test_daemon.h"

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

// All that is said about GPUs in one undisturbed life.
constexpr Kind kKinds[] = {
    {"gpu_arena_mapped", 2, true},
    {"worker_call.connect", 2, false},
    {"worker_reply.connected", 2, true},
    {"worker_call.await_ready", 2 * kBuckets + 2, false},
    {"worker_call.launch", 2 * kBuckets + 1, false},
    {"worker_reply.launched", 2 * kBuckets, true},
    {"worker_call.give_up_step", 1, false},
    {"worker_call.disconnect", 1, false},
    {"worker_call.new_nccl_id", 1, false},
    {"worker_reply.nccl_id", 1, true},
    {"worker_release", 1, false},
    {"worker_gone", 1, true},
    // Of calls that nothing is to be said about: AwaitReady, GiveUpStep, Disconnect; and that the
    // last launch has failed.
    {"worker_reply", 2 * kBuckets + 5, true},
};
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
  absl::Status status = absl::UnknownError("it was never told");
  std::uint64_t followed = 0;  // the step, if its stream waits for the end of it

  std::string reason() const { return status.ok() ? "OK" : ErrorReason(status); }
};

class Life {
 public:
  // `strike` is called while the message at `point` is held, and releases it.
  Life(std::optional<WirePoint> point, std::function<void(Life*)> strike)
      : proxy_(job_.coordinator(), std::move(point)), strike_(std::move(strike)) {}

  // The daemons are killed: one that is told to stop while Gloo connects to another node, which is
  // gone, waits for Gloo's own time limit.
  ~Life() {
    job_.End();
    for (const int node : {0, 1}) job_.node(node).Kill();
  }
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;

  GpuNodes& job() { return job_; }
  PeerProxy& proxy() { return proxy_; }
  const Sight& sight(std::uint32_t rank) const { return sights_[rank]; }
  // By what a rank's GPU says to its stream, or has said: a verdict of complete stays.
  bool SeenComplete(std::uint32_t rank) {
    const std::uint64_t step = sights_[rank].followed;
    return step > 0 && job_.rank(rank).Verdict(step) == 0;
  }

  // These return true if the message was held meanwhile.
  // A generation's first step, with all that it needs.
  bool Begin() {
    return Run([this](std::uint32_t rank) {
      SessionOptions options = job_.Options(rank);
      if (rank == 1) options.coordinator = proxy_.address();
      const absl::Status joined = job_.rank(rank).Join(options);
      return joined.ok() ? Step(rank, 1) : joined;
    });
  }
  // Rank 1 abandons step 2 when its worker waits for gradients that do not come.
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
    // The last words may come when every rank has been told.
    return held || HeldBy("worker_reply", kBuckets + 1) || HeldBy("worker_reply", kBuckets + 2);
  }
  // The last thing that alpha's worker does is an all-reduce of step 2.
  bool LoseWorkerInAllReduce() {
    job_.machine().Inject(absl::StrCat("ncclAllReduce 1 kill pid=", Worker(0)));
    const bool held = Run([this](std::uint32_t rank) {
      if (rank == 1) return Step(rank, 2);
      const absl::Status marked = job_.rank(rank).Mark(2, 0, 1);
      return marked.ok() ? job_.rank(rank).Wait(2) : marked;
    });
    return held || HeldBy("worker_release", 1) || HeldBy("worker_reply", CountOf("worker_reply")) ||
           HeldBy("worker_gone", 1);
  }

  // Of the node, once it runs.
  pid_t Worker(int node) {
    pid_t pid = -1;
    EXPECT_TRUE(job_.node(node).AwaitStatus([&](const v1::GetStatusResponse& now) {
      for (const v1::WorkerStatus& worker : now.cuda().workers()) {
        if (worker.state() == v1::WORKER_STATE_RUNNING) pid = worker.pid();
      }
      return pid > 0;
    })) << "it has no worker";
    return pid;
  }
  // Returns when its daemon knows.
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
  // Both ranks, each on a thread of its own.
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
  // By the `count`-th message of `kind`; the one before it was not held.
  bool HeldBy(const std::string& kind, int count) {
    proxy_.AwaitPassed({{kind, count}});
    const bool held = proxy_.AwaitHeld([] { return true; });
    if (held) strike_(this);
    return held;
  }

  GpuNodes job_{{{0, 0}, {1, 1}}};
  PeerProxy proxy_;
  const std::function<void(Life*)> strike_;
  std::array<Sight, kWorld> sights_;
};

// ---- Every message

struct WireCase {
  WirePoint point;
  Party killed = Party::kAlpha;
  // What the killed daemon had said is on the wire still, or is lost with it.
  bool deliver = true;
};
std::ostream& operator<<(std::ostream& out, const WireCase& one) {
  return out << NameOf(one.killed) << " killed at " << one.point.kind << " " << one.point.ordinal
             << (one.deliver ? "" : ", which is lost");
}

// False: it has died by then, or is about to.
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
             point.kind != "worker_gone";
    case Party::kBetasWorker:
      return !last_reply && point.kind != "worker_gone";
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
  kLostStep,       // in which alpha's worker dies in any case
  kNever,
};

using Outcomes = std::set<std::string>;  // reasons of errors; "OK": of a complete step

// What a rank may see.
Outcomes Allowed(Phase phase, const WireCase& one, std::uint32_t rank) {
  const bool agreeing = one.point.kind == "gpu_arena_mapped";
  // All that the step needs of beta may be on the wire, behind the held message.
  const bool answering = one.point.kind == "worker_reply.launched" && one.deliver;
  // All of it may be launched, or be about to be before anybody knows of the death. Of what never
  // is, nobody has doubts.
  const bool gated = one.point.kind == "worker_reply" && one.deliver;
  const bool launched = (phase == Phase::kFirstStep || phase == Phase::kNextFirstStep) &&
                        (gated || one.point.kind == "worker_call.launch" ||
                         one.point.kind == "worker_reply.launched");
  // By then; else it is not known which of them have.
  const bool ended = phase == Phase::kLostStep && rank == 1;
  const bool not_ended =
      agreeing || (phase >= Phase::kAbandonedStep && phase != Phase::kNextFirstStep &&
                   rank == (phase == Phase::kAbandonedStep ? 1u : 0u));
  Outcomes allowed;
  const auto lost_daemon = [&](const char* reason) {
    if (!ended) allowed.insert(reason);
    if (!not_ended) allowed.insert("STEP_IN_DOUBT");
  };
  // Its own session ends by that. The other rank is told of the first, or of the step's buckets,
  // which have failed.
  const auto lost_worker = [&](std::uint32_t worker_of) {
    allowed.insert("WORKER_LOST");
    if (rank != worker_of) allowed.insert("RANK_LOST");
    if (rank != worker_of && agreeing) {
      allowed.erase("WORKER_LOST");
      allowed.insert("LAYOUT_REFUSED");  // its arena there was not allocated yet
    }
    if (launched) allowed.insert("STEP_IN_DOUBT");
  };
  switch (one.killed) {
    case Party::kAlpha:
      lost_daemon(rank == 0 ? "DAEMON_LOST" : "COORDINATOR_LOST");
      break;
    case Party::kBeta:
      if (rank == 1) lost_daemon("DAEMON_LOST");
      // Its own worker may be killed for that, if it has a launch.
      if (rank == 0) allowed.insert({"RANK_LOST", "NODE_LOST"});
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
        EXPECT_EQ(ErrorField(sight.status, "rank"), absl::StrCat(1 - rank)) << sight.status;
      }
    }
    EXPECT_FALSE(complete && is_void) << "complete for one host or GPU, and void for another host";
  }
  // New trainers, on the daemons and workers that are left.
  static void ExpectNextGeneration(Life* life, Phase phase) {
    GpuNodes& job = life->job();
    job.End();
    // A worker that dies once more is started again only after a while.
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

TEST_P(EveryGpuMessageTest, CompleteOrVoidOnEveryRank) {
  if (!fakes::Isolated()) {
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    return fakes::RunIsolated(absl::StrCat(test->test_suite_name(), ".", test->name()),
                              MachineWithGpus(2));
  }
  Life life(GetParam().point, Strike);
  const Phase phase = Live(&life);
  ASSERT_NE(phase, Phase::kNever) << "it was never said";
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

ISOLATED_TEST(GpuMessages, TheListIsComplete, MachineWithGpus(2)) {
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
  // The last words come after the ranks' own.
  std::map<std::string, int> said;
  for (const auto& [kind, count] : life.proxy().AwaitPassed({{"worker_gone", 1}})) {
    if (kind.rfind("worker_", 0) == 0 || kind.rfind("gpu_", 0) == 0) said[kind] = count;
  }
  std::map<std::string, int> listed;
  for (const Kind& kind : kKinds) listed[kind.name] = kind.count;
  EXPECT_EQ(said, listed);
}

}  // namespace
}  // namespace gradsync
