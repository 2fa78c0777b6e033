// The process of a job's engine is attacked and killed. The daemon and the other jobs go on.

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/engine/socket_owner.h"
#include "gtest/gtest.h"
#include "tests/fault/peer_certificates.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/child_process.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"
#include "tests/kit/flood.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::fault {
namespace {

// Every rank learns of a lost engine process within this time.
constexpr std::uint64_t kEngineLossBoundNs = 1'000'000'000;

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The engine processes that this daemon has started.
std::vector<pid_t> EngineProcesses(const TestDaemon& daemon) {
  std::vector<pid_t> found;
  for (const pid_t pid : daemon.Processes()) {
    const std::string command = Contents("/proc/" + std::to_string(pid) + "/cmdline");
    if (command == std::string("gradsyncd\0--engine\0", 19)) found.push_back(pid);
  }
  return found;
}

// The inodes of the sockets that a process has open.
std::set<std::uint64_t> SocketsOf(pid_t pid) {
  std::set<std::uint64_t> found;
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd/";
  DIR* const open = opendir(folder.c_str());
  if (open == nullptr) return found;  // it has ended
  while (const dirent* entry = readdir(open)) {
    char file[64] = "";
    const ssize_t size = readlink((folder + entry->d_name).c_str(), file, sizeof(file) - 1);
    unsigned long inode = 0;  // NOLINT(google-runtime-int): as sscanf has it
    if (size > 0 && std::sscanf(file, "socket:[%lu]", &inode) == 1) found.insert(inode);
  }
  closedir(open);
  return found;
}

// A port at which an engine of this daemon listens. The inode is that of its socket.
struct EnginePort {
  std::string address;  // "host:port"
  std::uint64_t inode = 0;
};

std::vector<EnginePort> EnginePorts(const TestDaemon& daemon) {
  std::set<std::uint64_t> sockets;
  for (const pid_t engine : EngineProcesses(daemon)) sockets.merge(SocketsOf(engine));
  std::vector<EnginePort> found;
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);) {
    unsigned int address = 0;
    unsigned int port = 0;
    unsigned int state = 0;
    unsigned long inode = 0;  // NOLINT(google-runtime-int): as sscanf has it
    if (std::sscanf(line.c_str(), "%*d: %X:%X %*[0-9A-F]:%*X %X %*X:%*X %*X:%*X %*X %*u %*u %lu",
                    &address, &port, &state, &inode) != 4 ||
        state != TCP_LISTEN || sockets.count(inode) == 0) {
      continue;
    }
    const in_addr number{address};
    char host[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &number, host, sizeof(host));
    found.push_back({std::string(host) + ":" + std::to_string(port), inode});
  }
  return found;
}

// A local user without a job or a certificate: finds the port of each engine, sends what ended the
// daemon when Gloo listened there, data for which nobody has asked, and floods the port as long as
// it is open.
class Stranger {
 public:
  Stranger(const TestDaemon& first, const TestDaemon& second) : daemons_{&first, &second} {
    thread_ = std::thread([this] {
      while (!stop_) Attack();
    });
  }
  ~Stranger() {
    stop_ = true;
    thread_.join();
  }
  int reached() const { return reached_; }  // ports

 private:
  void Attack() {
    // nbytes, opcode SEND_UNBOUND_BUFFER, slot, offset, length, remote offset.
    const std::array<std::uint64_t, 6> message = {48 + 64, 1, 77, 0, 64, 0};
    for (const TestDaemon* const daemon : daemons_) {
      for (const EnginePort& port : EnginePorts(*daemon)) {
        if (!known_.insert(port.inode).second) continue;
        const Descriptor one = ConnectTcp(port.address, Flood::kAddress);
        if (one.get() < 0) continue;
        if (send(one.get(), message.data(), sizeof(message), MSG_NOSIGNAL) == sizeof(message)) {
          ++reached_;
        }
        floods_.push_back(std::make_unique<Flood>(port.address));
      }
    }
  }

  const std::array<const TestDaemon*, 2> daemons_;
  std::set<std::uint64_t> known_;
  std::vector<std::unique_ptr<Flood>> floods_;
  std::atomic<bool> stop_{false};
  std::atomic<int> reached_{0};
  std::thread thread_;
};

// A job of one node alone.
Trainers InnocentOf(const TestDaemon& daemon) {
  Trainers innocent = JoinedTrainers(daemon, 2, "innocent");
  ExpectAll(innocent, "register buckets=2 count=1000");
  ExpectAll(innocent, "step");
  return innocent;
}

constexpr char kLayout[] = "register buckets=3 count=200000";

class EngineProcessTest : public testing::Test, public TwoNodes {
 protected:
  void ExpectLost(const Reply& reply, const std::string& node) {
    EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
    // The other node may be the first to report it.
    EXPECT_TRUE(reply.reason == "ENGINE_LOST" || reply.reason == "ENGINE_PEER_LOST") << reply;
    EXPECT_EQ(reply.Field("node"), node) << reply;
    EXPECT_NE(reply.message.find("job 'job'"), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("Join again from every rank"), std::string::npos) << reply;
  }
};

// With and without TLS. Neither the daemon nor the innocent job, and not even the job whose port it
// is.
class EnginePortTest : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Of, EnginePortTest, testing::Bool(), [](const auto& tested) {
  return std::string(tested.param ? "Tls" : "ClearText");
});

TEST_P(EnginePortTest, StrangerAtAnEnginesPortHarmsNobody) {
  if (!daemon::CanFindOwners()) GTEST_SKIP() << "the kernel does not say who a local caller is";
  const PeerCertificates certificates;
  const std::vector<std::string> flags =
      GetParam() ? certificates.Flags() : std::vector<std::string>();
  TwoNodes nodes(flags, flags);
  const Trainers innocent = InnocentOf(nodes.alpha());
  const Stranger stranger(nodes.alpha(), nodes.beta());
  // Each job has its own engine, whose port is open for a moment. Beside busy processes the
  // stranger finds one port in 30.
  for (int round = 0; round < 5 || (stranger.reached() == 0 && round < 400); ++round) {
    Trainers attacked;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      attacked.push_back(std::make_unique<Trainer>(rank == 0 ? nodes.alpha() : nodes.beta(), rank,
                                                   2, "attacked" + std::to_string(round),
                                                   "coordinator=" + nodes.coordinator()));
    }
    JoinAll(attacked);
    ExpectAll(attacked, kLayout);
    ExpectAll(attacked, "step times=3");
    ASSERT_TRUE(nodes.alpha().process().running() && nodes.beta().process().running());
    ExpectAll(innocent, "step times=20");
  }
  EXPECT_GT(stranger.reached(), 0) << "the stranger has found no port";
}

TEST_F(EngineProcessTest, KilledProcessFailsItsJobByNameAndNothingElse) {
  const Trainers innocent = InnocentOf(alpha());
  for (const bool moving : {false, true}) {
    for (TestDaemon* const victim : {&beta(), &alpha()}) {
      const std::string node = victim == &alpha() ? "alpha" : "beta";
      SCOPED_TRACE(node + (moving ? " in a step" : " between steps"));
      const Trainers trainers = Join();
      ExpectAll(trainers, kLayout);
      ExpectAll(trainers, "step");
      for (const auto& trainer : trainers) {
        trainer->Begin(moving ? "step times=1000000" : "wait 2");
      }
      // Steps of another job pass in the meantime.
      ExpectAll(innocent, "step times=20");
      const std::vector<pid_t> engines = EngineProcesses(*victim);
      ASSERT_EQ(engines.size(), 1u);
      const std::uint64_t killed_ns = NowNs();
      ASSERT_EQ(kill(engines[0], SIGKILL), 0);
      for (const auto& trainer : trainers) {
        const Reply reply = trainer->Result();
        ExpectLost(reply, node);
        EXPECT_LE(reply.end_ns - killed_ns, FairBoundNs(kEngineLossBoundNs, killed_ns)) << reply;
      }
      ExpectAll(innocent, "step times=20");
    }
  }
  const Trainers again = Join();
  ExpectAll(again, kLayout);
  ExpectAll(again, "step times=3");
  ExpectAll(again, "leave");
}

TEST_F(EngineProcessTest, ProcessesEndWithTheirDaemon) {
  for (const bool kill : {true, false}) {
    const Trainers trainers = Join();
    ExpectAll(trainers, kLayout);
    ExpectAll(trainers, "step");
    const std::vector<pid_t> engines = EngineProcesses(beta());
    ASSERT_EQ(engines.size(), 1u);
    if (kill) {
      beta().Kill();
    } else {
      EXPECT_EQ(beta().Stop(), 0);
    }
    const std::string name = "/proc/" + std::to_string(engines[0]) + "/cmdline";
    EXPECT_TRUE(alpha().AwaitStatus([&](const auto&) { return Contents(name).empty(); }));
    beta().Start();
  }
}

}  // namespace
}  // namespace gradsync::fault
