// The daemon as a service: how it starts, what it reports to its manager, how it stops.

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

bool Exists(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

bool Draining(const v1::GetStatusResponse& status) {
  return status.state() == v1::DAEMON_STATE_DRAINING;
}

struct Ended {
  int code = -1;
  std::string said;
};

// Runs a gradsyncd that is expected to end by itself.
Ended RunToItsEnd(const std::vector<std::string>& flags, const TemporaryDirectory& directory) {
  const std::string path = directory.File("said");
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  ChildOptions options;
  options.arguments = {"daemon/gradsyncd"};
  options.arguments.insert(options.arguments.end(), flags.begin(), flags.end());
  options.error = file.get();
  ChildProcess process(options);
  const auto status = process.Wait(kPatienceMs);
  std::ifstream text(path);
  return {status.has_value() && WIFEXITED(*status) ? WEXITSTATUS(*status) : -1,
          std::string(std::istreambuf_iterator<char>(text), {})};
}

TEST(Start, NamesEveryBadFlagAndExitsWith2) {
  TemporaryDirectory directory;
  const Ended ended = RunToItsEnd(
      {"--socket=relative.sock", "--lease=5", "--reduce_threads=many", "--no_such_option=1"},
      directory);
  EXPECT_EQ(ended.code, 2) << ended.said;
  for (const char* name : {"--socket", "--lease", "--reduce_threads", "no_such_option"}) {
    EXPECT_NE(ended.said.find(name), std::string::npos) << name << " is not in: " << ended.said;
  }
}

TEST(Start, IsRefusedOnTheSocketOfALiveDaemon) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  const Ended ended = RunToItsEnd({"--socket=" + daemon.socket()}, daemon.directory());
  EXPECT_EQ(ended.code, 1) << ended.said;
  EXPECT_NE(ended.said.find("another daemon listens on " + daemon.socket()), std::string::npos)
      << ended.said;
  ExpectAll(trainers, "barrier");
  EXPECT_TRUE(Exists(daemon.socket()));
  const auto more = JoinedTrainers(daemon, 2, "more");
  ExpectAll(more, "register");
}

TEST(Start, ReplacesTheSocketsOfAKilledDaemon) {
  TestDaemon daemon;
  daemon.Kill();
  EXPECT_TRUE(Exists(daemon.socket()));
  EXPECT_TRUE(Exists(daemon.side_socket()));
  daemon.Start();
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
}

TEST(Start, IsRefusedOnAFileOrInAMissingDirectoryAndChangesNothing) {
  TemporaryDirectory directory;
  const std::string file = directory.File("precious.sock");
  std::ofstream(file) << "text";
  const Ended taken = RunToItsEnd({"--socket=" + file}, directory);
  EXPECT_EQ(taken.code, 1);
  EXPECT_NE(taken.said.find("is not a socket"), std::string::npos) << taken.said;
  std::string text;
  std::ifstream(file) >> text;
  EXPECT_EQ(text, "text");
  const Ended nowhere = RunToItsEnd({"--socket=" + directory.File("none/g.sock")}, directory);
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_NE(nowhere.said.find("does not exist"), std::string::npos) << nowhere.said;
}

Descriptor Listen(const std::string& path, int type) {
  Descriptor fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(fd.get(), 16), 0);
  return fd;
}

TEST(Start, UsesTheSocketsOfTheServiceManager) {
  TemporaryDirectory directory;
  NotifySocket notify(directory.File("notify"));
  const Descriptor grpc = Listen(directory.File("passed.sock"), SOCK_STREAM);
  const Descriptor side = Listen(directory.File("passed-fd.sock"), SOCK_SEQPACKET);
  ChildOptions options;
  options.arguments = {"daemon/gradsyncd"};
  options.environment = {"NOTIFY_SOCKET=" + notify.path(), "LISTEN_FDS=2",
                         "LISTEN_FDNAMES=fd:grpc"};
  options.passed = {side.get(), grpc.get()};
  options.listen_pid = true;
  ChildProcess daemon(options);
  ASSERT_TRUE(notify.Await("READY=1", kPatienceMs));
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    trainers.push_back(
        std::make_unique<Trainer>(directory.File("passed.sock"), rank, 2, "job", ""));
  }
  JoinAll(trainers);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step");
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(kPatienceMs), std::optional<int>(0));
  // The daemon keeps the sockets: the manager owns them and may start it again on them.
  EXPECT_TRUE(Exists(directory.File("passed.sock")));
}

TEST(ServiceManager, ReceivesReadyWatchdogAndStopping) {
  TestDaemon daemon({}, {"WATCHDOG_USEC=200000"});  // its constructor waits for READY=1
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(daemon.notify().Await("WATCHDOG=1", kPatienceMs));
  daemon.process().Signal(SIGTERM);
  EXPECT_TRUE(daemon.notify().Await("STOPPING=1", kPatienceMs));
  EXPECT_EQ(daemon.process().Wait(kPatienceMs), std::optional<int>(0));
}

TEST(Sigterm, FinishesTheRunningStepRefusesJoinsAndRemovesTheSockets) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register buckets=2");
  ExpectAll(trainers, "mark 1 0");
  for (const auto& trainer : trainers) {
    ASSERT_EQ(trainer->Do("wait 1 timeout_ms=1").reason, "WAIT_TIMEOUT");
  }
  daemon.process().Signal(SIGTERM);
  ASSERT_TRUE(daemon.AwaitStatus(Draining));
  Trainer late(daemon, 0, 1, "late", "connect_timeout_ms=0");
  const Reply refused = late.Join();
  EXPECT_EQ(refused.code, "UNAVAILABLE") << refused;
  EXPECT_EQ(refused.reason, "DRAINING") << refused;
  ExpectAll(trainers, "mark 1 1");
  ExpectAll(trainers, "end 1");
  ExpectAll(trainers, "wait 1");
  for (const auto& trainer : trainers) {
    // The session may end a moment after the step.
    const Reply reply = trainer->Do("barrier");
    EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
    EXPECT_EQ(reply.reason, "DRAINING") << reply;
  }
  EXPECT_EQ(daemon.process().Wait(kPatienceMs), std::optional<int>(0));
  EXPECT_FALSE(Exists(daemon.socket()));
  EXPECT_FALSE(Exists(daemon.side_socket()));
}

TEST(Sigterm, EndsAStepAtTheDrainTimeout) {
  TestDaemon daemon({"--drain_timeout=300ms"});
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register buckets=2");
  ASSERT_TRUE(trainers[0]->Do("mark 1 0").ok());
  ASSERT_EQ(trainers[0]->Do("wait 1 timeout_ms=1").reason, "WAIT_TIMEOUT");
  trainers[0]->Begin("wait 1");
  daemon.process().Signal(SIGTERM);
  const Reply reply = trainers[0]->Result();
  EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
  EXPECT_EQ(reply.reason, "DRAINING") << reply;
  EXPECT_EQ(daemon.process().Wait(kPatienceMs), std::optional<int>(0));
}

TEST(Sigterm, SecondOneEndsTheDrain) {
  TestDaemon daemon({"--drain_timeout=3m"});
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register buckets=2");
  ASSERT_TRUE(trainers[0]->Do("mark 1 0").ok());
  ASSERT_EQ(trainers[0]->Do("wait 1 timeout_ms=1").reason, "WAIT_TIMEOUT");
  trainers[0]->Begin("wait 1");
  const std::uint64_t start_ns = NowNs();
  daemon.process().Signal(SIGTERM);
  ASSERT_TRUE(daemon.AwaitStatus(Draining));
  daemon.process().Signal(SIGTERM);
  EXPECT_EQ(daemon.process().Wait(kPatienceMs), std::optional<int>(0));
  EXPECT_LT(NowNs() - start_ns, 60'000'000'000ull);
  EXPECT_EQ(trainers[0]->Result().code, "UNAVAILABLE");
}

TEST(IdleDaemon, UsesNoCpu) {
  TestDaemon daemon;
  {
    const auto trainers = JoinedTrainers(daemon, 2);
    ExpectAll(trainers, "register");
    ExpectAll(trainers, "step");
    ExpectAll(trainers, "leave");
  }
  ASSERT_TRUE(daemon.AwaitStatus([](const auto& status) { return status.arena_bytes() == 0; }));
  constexpr int kWindowMs = 2000;
  const std::uint64_t before_ns = daemon.CpuNs();
  ASSERT_GT(before_ns, 0u);
  EXPECT_FALSE(daemon.notify().Await("nothing", kWindowMs));  // waits for kWindowMs
  const std::uint64_t used_ns = daemon.CpuNs() - before_ns;
  std::printf("idle: %.3f %% of a core\n", static_cast<double>(used_ns) / kWindowMs / 1e4);
  EXPECT_LT(used_ns, kWindowMs * 1'000'000ull / 200 * kScale) << "0.5 % of a core";
}

}  // namespace
}  // namespace gradsync::fault
