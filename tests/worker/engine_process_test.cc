// What the daemon makes of an engine process that breaks, or breaks the protocol.

#include "daemon/worker/engine_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/passed_descriptors.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/peer_tls_keys.h"
#include "daemon/reduce/turn_gate.h"
#include "daemon/worker/engine_priorities.h"
#include "tests/engine/engine_bucket.h"
#include "tests/engine/event.h"
#include "tests/engine/memory_store.h"
#include "tests/kit/deadline.h"
#include "tests/kit/in_child.h"
#include "tests/kit/soon.h"
#include "tests/kit/wake_up_delay.h"
#include "tests/worker/process_cluster.h"

namespace gradsync::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ScriptedEngine {
 public:
  explicit ScriptedEngine(const std::string& script,
                          std::shared_ptr<const PeerTlsKeys> keys = nullptr,
                          const EngineUser& user = {}) {
    EngineOptions options = ProcessOptions(2);
    options.keys = std::move(keys);
    options.store = &store_;
    options.failed = [this](const absl::Status& why) {
      ++failures_;
      failed_.Set(why);
    };
    WorkerProcessOptions process;
    process.program = "tests/worker/scripted_engine";
    process.environment = {"SCRIPT=" + script};
    engine_ = EngineProcess::Connect(options, process, user);
  }

  MemoryStore store_;
  std::atomic<int> failures_{0};
  Event failed_;
  absl::StatusOr<std::unique_ptr<EngineProcess>> engine_;
};

void ExpectLost(const absl::Status& status, const std::string& how) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(DetailsOf(status).reason, "ENGINE_LOST") << status;
  EXPECT_EQ(DetailsOf(status).Value(field::kNode), "node-0") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the engine process of node node-0"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(how));
}

TEST(EngineProcess, ProcessThatBreaksTheProtocolIsKilled) {
  constexpr char kMalformed[] = "malformed request for a chunk and was killed";
  const std::vector<std::pair<std::string, std::string>> scripts = {
      {"dies", "was killed by signal 9"},
      {"finishes early", "finished an exchange before its last chunk and was killed"},
      {"asks for an unknown exchange", kMalformed},
      {"asks for an unknown step", kMalformed},
      {"asks for nothing", kMalformed},
      {"asks beyond the bucket", kMalformed},
      {"asks far beyond the bucket", kMalformed},
      {"asks for a part of a vector", kMalformed},
      {"asks beyond the memory", kMalformed},
      {"asks at the memory's end", kMalformed},
      {"asks for another place", kMalformed},
      {"asks twice", kMalformed},
      {"sends a short request", kMalformed},
  };
  for (const auto& [script, how] : scripts) {
    SCOPED_TRACE(script);
    ScriptedEngine scripted(script);
    ASSERT_TRUE(scripted.engine_.ok()) << scripted.engine_.status();
    EngineBucket bucket(DataType::kFloat32, 1000, 0);
    (*scripted.engine_)->Submit(bucket.exchange());
    const auto status = bucket.Wait();
    ASSERT_TRUE(status.has_value());
    ExpectLost(*status, how);
    ASSERT_TRUE(scripted.failed_.Wait().has_value());
    // A later exchange and a broadcast fail alike, and not from within the call.
    EngineBucket late(DataType::kFloat32, 1000, 0);
    (*scripted.engine_)->Submit(late.exchange());
    EXPECT_EQ(late.Wait(), status);
    Event broadcast;
    std::byte byte{};
    (*scripted.engine_)->Broadcast({&byte}, 1, 1, [&](const absl::Status& why) {
      broadcast.Set(why);
    });
    EXPECT_EQ(broadcast.Wait(), status);
    EXPECT_EQ(scripted.failures_, 1);
  }
}

// The thread that reads a descriptor also closes it, and that may take long.
TEST(EngineProcess, ProcessCanPassNoDescriptors) {
  const UniqueFd probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!RefuseDescriptors(probe.get())) GTEST_SKIP() << "before Linux 6.16";
  ScriptedEngine scripted("passes descriptors");
  ASSERT_TRUE(scripted.engine_.ok()) << scripted.engine_.status();
  EngineBucket bucket(DataType::kFloat32, 1000, 0);
  (*scripted.engine_)->Submit(bucket.exchange());
  const auto status = bucket.Wait();
  ASSERT_TRUE(status.has_value());
  ExpectLost(*status, "exited with status 9");
}

TEST(EngineProcess, ProcessThatBreaksWhileNodesConnectIsAnError) {
  ExpectLost(ScriptedEngine("dies while nodes connect").engine_.status(), "exited with status 6");
  ExpectLost(ScriptedEngine("asks for too many values").engine_.status(), "asked for too much");
}

// Otherwise a process that does not read could make the daemon keep answers without end.
TEST(EngineProcess, ProcessGetsEachValueOnce) {
  const ScriptedEngine once("asks for one value");
  EXPECT_TRUE(once.engine_.ok()) << once.engine_.status();
  ExpectLost(ScriptedEngine("asks for one value twice").engine_.status(),
             "asked for too much: a value twice");
}

// With vm.memfd_noexec=2 the kernel makes no others.
TEST(EngineProcess, ItsMemoryAndKeysCanNeverBeExecuted) {
  constexpr unsigned int kNoExecSeal = 0x8;  // MFD_NOEXEC_SEAL: Debian 12's headers lack it
  const UniqueFd probe(memfd_create("probe", MFD_CLOEXEC | kNoExecSeal));
  if (!probe.valid()) GTEST_SKIP() << "before Linux 6.3";
  ScriptedEngine scripted("checks its memory and keys",
                          std::make_shared<const PeerTlsKeys>(PeerTlsKeys{"a", "b", "c"}));
  EXPECT_TRUE(scripted.engine_.ok()) << scripted.engine_.status();
}

TEST(EngineProcess, ProgramThatCannotBeStartedIsAnError) {
  MemoryStore store;
  EngineOptions options = ProcessOptions(2);
  options.store = &store;
  WorkerProcessOptions process;
  process.program = "/nonexistent/gradsyncd";
  EXPECT_THAT(EngineProcess::Connect(options, process).status().ToString(),
              HasSubstr("/nonexistent/gradsyncd"));
}

TEST(EngineProcess, StoppedProcessIsKilledOnceItHasBeenSilentForTooLong) {
  ScriptedEngine scripted("stops");
  ASSERT_TRUE(scripted.engine_.ok()) << scripted.engine_.status();
  EngineBucket bucket(DataType::kFloat32, 1000, 0);
  (*scripted.engine_)->Submit(bucket.exchange());
  const auto status = bucket.Wait();
  ASSERT_TRUE(status.has_value());
  ExpectLost(*status, "no sign of life");
}

// An engine whose lane waits for its turn, because another user has the only one.
class WaitingLane : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(scripted_.engine_.ok()) << scripted_.engine_.status();
    bucket_.exchange()->gather = [this](std::size_t, std::size_t, std::byte*) { ++gathers_; };
    (*scripted_.engine_)->Submit(bucket_.exchange());
    ASSERT_TRUE(Soon([this] { return gate_.waiting() == 1; }));
  }

  TurnGate gate_{1};
  TurnGate::Client other_{&gate_, Tenant(1)};
  std::unique_ptr<TurnGate::Turn> turn_ = std::make_unique<TurnGate::Turn>(&other_, 1);
  ScriptedEngine scripted_{"asks", nullptr, {&gate_, nullptr, Tenant(2)}};
  EngineBucket bucket_{DataType::kFloat32, 1000, 0};
  std::atomic<int> gathers_{0};
};

TEST_F(WaitingLane, GoesOnInItsTurn) {
  EXPECT_EQ(gathers_, 0);
  turn_ = nullptr;
  const auto status = bucket_.Wait();
  ASSERT_TRUE(status.has_value());
  ExpectLost(*status, "finished an exchange before its last chunk");
  EXPECT_EQ(gathers_, 1);
}

TEST_F(WaitingLane, EndsWithItsProcess) {
  ASSERT_EQ(kill((*scripted_.engine_)->pid(), SIGKILL), 0);
  const auto status = bucket_.Wait();
  ASSERT_TRUE(status.has_value());
  ExpectLost(*status, "was killed by signal 9");
  *scripted_.engine_ = nullptr;
  EXPECT_EQ(gathers_, 0);
  EXPECT_EQ(gate_.waiting(), 0u);
}

// An engine process of a user, with two threads and a bucket that it does not finish.
class NiceEngine {
 public:
  NiceEngine(EnginePriorities* priorities, std::uint32_t user)
      : scripted_("has another thread", nullptr, {nullptr, priorities, Tenant(user)}) {}

  bool Submit() {
    if (!scripted_.engine_.ok()) return false;
    (*scripted_.engine_)->Submit(bucket_.exchange());
    return true;
  }
  std::vector<int> NiceOfThreads() const {
    std::vector<int> nice;
    const std::string tasks = "/proc/" + std::to_string((*scripted_.engine_)->pid()) + "/task";
    for (const auto& entry : std::filesystem::directory_iterator(tasks)) {
      const auto thread = static_cast<id_t>(std::stoul(entry.path().filename().string()));
      nice.push_back(getpriority(PRIO_PROCESS, thread));
    }
    return nice;
  }

 private:
  EngineBucket bucket_{DataType::kFloat32, 1000, 0};
  ScriptedEngine scripted_;
};

// Whether this process may have a lower nice value again.
bool MayLowerNice() {
  return InChild([] {
           const int own = getpriority(PRIO_PROCESS, 0);
           const bool may =
               setpriority(PRIO_PROCESS, 0, own + 1) == 0 && setpriority(PRIO_PROCESS, 0, own) == 0;
           return may ? 0 : 1;
         }) == 0;
}

TEST(EngineProcess, AllThreadsShareTheirUsersWeight) {
  EnginePriorities priorities;
  const int own = getpriority(PRIO_PROCESS, 0);
  const int half = std::min(own + 3, 19);
  NiceEngine first(&priorities, 1);
  NiceEngine other(&priorities, 2);
  auto second = std::make_unique<NiceEngine>(&priorities, 1);
  ASSERT_TRUE(first.Submit() && other.Submit());
  EXPECT_THAT(first.NiceOfThreads(), ElementsAre(own, own));
  ASSERT_TRUE(second->Submit());
  EXPECT_THAT(first.NiceOfThreads(), ElementsAre(half, half));
  EXPECT_THAT(second->NiceOfThreads(), ElementsAre(half, half));
  EXPECT_THAT(other.NiceOfThreads(), ElementsAre(own, own));
  second = nullptr;
  const int then = MayLowerNice() ? own : half;
  EXPECT_THAT(first.NiceOfThreads(), ElementsAre(then, then));
}

TEST(EngineProcess, SettingsOfAnotherNodeAreChecked) {
  MemoryStore store;
  EngineOptions options = ProcessOptions(2);
  options.store = &store;
  for (const auto& change : std::vector<void (*)(EngineOptions*)>{
           [](EngineOptions* o) { o->lanes = 17; }, [](EngineOptions* o) { o->lanes = 0; },
           [](EngineOptions* o) { o->chunk_bytes = std::size_t{1} << 40; },
           [](EngineOptions* o) { o->nodes = 1; }, [](EngineOptions* o) { o->node = 2; }}) {
    EngineOptions changed = options;
    change(&changed);
    EXPECT_EQ(EngineProcess::Connect(changed).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(EngineProcess, CancelledStoreEndsConnectingAtOnce) {
  MemoryStore store;
  EngineOptions options = ProcessOptions(2);
  options.store = &store;
  WorkerProcessOptions process;
  process.program = "daemon/gradsyncd";
  absl::Status status;
  std::thread connecting([&] { status = EngineProcess::Connect(options, process).status(); });
  ASSERT_TRUE(store.Get("watch/0", absl::Seconds(60)).ok());
  const std::uint64_t cancelled_ns = NowNs();
  store.Cancel(absl::CancelledError("the job has ended"));
  connecting.join();
  EXPECT_EQ(status, absl::CancelledError("the job has ended"));
  EXPECT_LT(NowNs() - cancelled_ns, FairBoundNs(5'000'000'000, cancelled_ns));
}

TEST(EngineProcess, MissingNodeIsNamed) {
  MemoryStore store;
  EngineOptions options = ProcessOptions(2);
  options.store = &store;
  options.connect_timeout = absl::Milliseconds(300);
  WorkerProcessOptions process;
  process.program = "daemon/gradsyncd";
  const absl::Status status = EngineProcess::Connect(options, process).status();
  EXPECT_EQ(DetailsOf(status).reason, "ENGINE_TIMEOUT") << status;
  EXPECT_EQ(DetailsOf(status).Value(field::kNode), "node-1") << status;
}

TEST(EngineProcess, KilledProcessFailsTheEnginesOfAllNodes) {
  std::atomic<int> failures{0};
  auto engines = ConnectProcesses(ProcessOptions(2), [&](std::uint32_t, EngineOptions* options) {
    options->failed = [&](const absl::Status&) { ++failures; };
  });
  ASSERT_TRUE(engines[0].ok() && engines[1].ok());
  // Only node 0 submits, so the exchange waits.
  EngineBucket bucket(DataType::kFloat32, 100'000, 0);
  (*engines[0])->Submit(bucket.exchange());
  ASSERT_EQ(kill((*engines[0])->pid(), SIGKILL), 0);
  const auto lost = bucket.Wait();
  ASSERT_TRUE(lost.has_value());
  ExpectLost(*lost, "was killed by signal 9");
  EngineBucket other(DataType::kFloat32, 100'000, 1);
  (*engines[1])->Submit(other.exchange());
  const auto peer = other.Wait();
  ASSERT_TRUE(peer.has_value());
  EXPECT_EQ(DetailsOf(*peer).reason, "ENGINE_PEER_LOST") << *peer;
  EXPECT_EQ(DetailsOf(*peer).Value(field::kNode), "node-0") << *peer;
  engines.clear();
  EXPECT_EQ(failures, 2);
}

}  // namespace
}  // namespace gradsync::daemon
