// Whoever reaches the peer port gets few descriptors and few engines there, and no other node's job
// notices. The attacker calls from an address of its own.

#include <arpa/inet.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradsync/v1/peer.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::attack {
namespace {

using fault::ExpectAll;
using fault::JoinAll;
using fault::Reply;
using fault::Trainer;
using fault::Trainers;

// All loopback addresses belong to this machine, so anyone may call from any of them.
constexpr char kAttackersAddress[] = "127.0.0.9";

sockaddr_in AddressOf(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  EXPECT_EQ(inet_pton(AF_INET, host.c_str(), &address.sin_addr), 1);
  return address;
}

// Connects to "host:port" from the attacker's address. Invalid: it was refused.
Descriptor ConnectAsAttacker(const std::string& to) {
  const std::size_t colon = to.rfind(':');
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in from = AddressOf(kAttackersAddress, 0);
  const sockaddr_in address = AddressOf(to.substr(0, colon), std::stoi(to.substr(colon + 1)));
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&from), sizeof(from)) != 0 ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Descriptor();
  }
  return fd;
}

// Nodes alpha and beta with a job, and node gamma. The daemons may have few descriptors.
class PeerPort : public testing::Test {
 protected:
  static std::vector<std::string> FewDescriptors() {
    return {"/usr/bin/prlimit", "--nofile=1024:1024"};
  }
  Trainers Join(const std::string& job, const TestDaemon& first, const TestDaemon& second) const {
    const std::string options = "coordinator=" + alpha_.Status().peer_address();
    Trainers trainers;
    trainers.push_back(std::make_unique<Trainer>(first, 0, 2, job, options));
    trainers.push_back(std::make_unique<Trainer>(second, 1, 2, job, options));
    JoinAll(trainers);
    ExpectAll(trainers, "register buckets=2 count=1000");
    ExpectAll(trainers, "step times=2");
    return trainers;
  }
  void SetUp() override { innocent_ = Join("innocent", alpha_, beta_); }
  // The innocent job goes on, a new node's job can begin, and the daemon answers.
  void ExpectUnharmed() {
    ExpectAll(innocent_, "step times=10");
    Join("new" + std::to_string(++new_jobs_), alpha_, gamma_);
    EXPECT_GE(alpha_.Status().jobs_size(), 1);
    ExpectAll(innocent_, "step times=10");
  }

  const TestDaemon alpha_{fault::TwoNodes::Flags("127.0.0.1", "alpha"), {}, FewDescriptors()};
  const TestDaemon beta_{fault::TwoNodes::Flags("127.0.0.2", "beta")};
  const TestDaemon gamma_{fault::TwoNodes::Flags("127.0.0.3", "gamma")};
  Trainers innocent_;
  int new_jobs_ = 0;
};

// ---- Connections

TEST_F(PeerPort, ConnectionsOfOneAddressLeaveDescriptorsToTheOthers) {
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit all{before.rlim_max, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &all), 0);
  const std::string peer = alpha_.Status().peer_address();
  std::atomic<bool> stop{false}, full{false};
  // As many as it can get, and a new one for each that the daemon closes.
  std::thread attacker([&] {
    std::vector<Descriptor> connections(1500);
    while (!stop) {
      for (Descriptor& one : connections) {
        char byte = 0;
        const bool closed =
            one.get() < 0 || recv(one.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
        if (closed) one = ConnectAsAttacker(peer);
        if (stop) break;
      }
      full = true;
    }
  });
  while (!full) ExpectAll(innocent_, "step");
  ExpectUnharmed();
  stop = true;
  attacker.join();
  setrlimit(RLIMIT_NOFILE, &before);
}

// ---- Streams without Hello

TEST_F(PeerPort, StreamsOfOneAddressWithoutHelloAreFew) {
  constexpr std::size_t kMost = 64, kMore = 20;
  const auto channel = grpc::CreateInsecureChannelFromFd(
      "peer", dup(ConnectAsAttacker(alpha_.Status().peer_address()).get()));
  const auto stub = v1::Peer::NewStub(channel);
  struct Silent {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream;
    std::thread reader;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t refused = 0, ended = 0;
  std::vector<std::unique_ptr<Silent>> streams;
  for (std::size_t i = 0; i < kMost + kMore; ++i) {
    Silent& silent = *streams.emplace_back(std::make_unique<Silent>());
    silent.stream = stub->Attach(&silent.context);
    silent.reader = std::thread([&] {
      v1::AttachResponse message;
      while (silent.stream->Read(&message)) {
      }
      const grpc::Status end = silent.stream->Finish();
      const bool quota =
          end.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
          end.error_message().find("newer streams without Hello") != std::string::npos;
      const std::lock_guard<std::mutex> lock(mutex);
      ++ended;
      if (quota) ++refused;
      changed.notify_all();
    });
  }
  {
    // All others end when the time for Hello has passed.
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return refused == kMore || ended == streams.size(); });
    EXPECT_EQ(refused, kMore);
  }
  ExpectUnharmed();
  for (const auto& silent : streams) silent->context.TryCancel();
  for (const auto& silent : streams) silent->reader.join();
}

// ---- A coordinator that a trainer has chosen

// A coordinator that says what the test says.
class FakeCoordinator final : public v1::Peer::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::AttachResponse, v1::AttachRequest>;

  explicit FakeCoordinator(std::function<void(Stream*)> script) : script_(std::move(script)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.8:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return "127.0.0.8:" + std::to_string(port_); }

  static v1::AttachResponse Welcome() {
    v1::AttachResponse message;
    message.mutable_welcome()->set_instance(std::string(16, 'c'));
    message.mutable_welcome()->set_node_name("fake");
    return message;
  }
  // To connect with a node that does not answer.
  static v1::AttachResponse ConnectEngine(std::uint64_t epoch) {
    v1::AttachResponse message;
    v1::ConnectEngine* const connect = message.mutable_connect_engine();
    connect->set_epoch(epoch);
    connect->set_node(1);
    connect->add_node_names("fake");
    connect->add_node_names("alpha");
    connect->set_address("127.0.0.1");
    connect->set_lanes(2);
    connect->set_chunk_bytes(2 << 20);
    connect->set_wire_type(v1::WIRE_TYPE_SAME);
    connect->set_silence_limit_ms(8000);
    return message;
  }

 private:
  grpc::Status Attach(grpc::ServerContext* /*context*/, Stream* stream) override {
    script_(stream);
    return grpc::Status::OK;
  }

  const std::function<void(Stream*)> script_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

int ProcessesOf(const TestDaemon& daemon) {
  int count = 0;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator(
           "/proc/" + std::to_string(daemon.pid()) + "/task", error)) {
    std::ifstream children(task.path() / "children");
    for (int child = 0; children >> child;) ++count;
  }
  return count;
}

TEST_F(PeerPort, ACoordinatorGivesNoOrdersBeforeItsWelcome) {
  FakeCoordinator fake([](FakeCoordinator::Stream* stream) {
    v1::AttachRequest message;
    stream->Read(&message);  // Hello
    for (std::uint64_t epoch = 1; epoch <= 10; ++epoch) {
      stream->Write(FakeCoordinator::ConnectEngine(epoch));
    }
    while (stream->Read(&message)) {
    }
  });
  const int before = ProcessesOf(alpha_);
  Trainer attacker(alpha_, 1, 2, "attack", "coordinator=" + fake.address());
  const Reply refused = attacker.Join();
  EXPECT_EQ(refused.reason, "COORDINATOR_REFUSED") << refused;
  EXPECT_NE(refused.message.find("'connect_engine' before its Welcome"), std::string::npos)
      << refused;
  EXPECT_EQ(ProcessesOf(alpha_), before) << "no engine was made";
  ExpectUnharmed();
}

TEST_F(PeerPort, ACoordinatorHasAFewEnginesAtATime) {
  constexpr int kMost = 4;
  constexpr std::uint64_t kAsked = 40;
  std::atomic<int> refused{0};
  std::atomic<int> most{0};
  FakeCoordinator fake([&](FakeCoordinator::Stream* stream) {
    v1::AttachRequest message;
    stream->Read(&message);  // Hello
    stream->Write(FakeCoordinator::Welcome());
    for (std::uint64_t epoch = 1; epoch <= kAsked; ++epoch) {
      stream->Write(FakeCoordinator::ConnectEngine(epoch));
    }
    // Each engine that is refused is answered at once.
    while (refused < 20 && stream->Read(&message)) {
      most = std::max(most.load(), ProcessesOf(alpha_));
      if (message.has_launch_done() && message.launch_done().status().message().find(
                                           "has connected 4 engines") != std::string::npos) {
        ++refused;
      }
    }
  });
  const int before = ProcessesOf(alpha_);
  Trainer attacker(alpha_, 1, 2, "attack", "coordinator=" + fake.address());
  attacker.Begin(attacker.join());
  ExpectUnharmed();
  EXPECT_TRUE(alpha_.AwaitStatus([&](const auto&) { return refused >= 20; }));
  // The innocent jobs have two.
  EXPECT_LE(most, before + kMost + 2);
  attacker.Kill();
  ExpectUnharmed();
}

}  // namespace
}  // namespace gradsync::attack
