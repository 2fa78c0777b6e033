// A caller of the peer port gets few descriptors, little memory and few engines there, and no other
// node's job notices. The attacker calls from an address of its own.

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <iostream>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/peer.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/attack/logged_reasons.h"
#include "tests/attack/raw_http2.h"
#include "tests/fault/fake_coordinator.h"
#include "tests/fault/raw_session.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/child_process.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"
#include "tests/kit/process_memory.h"
#include "tests/kit/soon.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::attack {
namespace {

using fault::ExpectAll;
using fault::FakeCoordinator;
using fault::JoinAll;
using fault::Reply;
using fault::Trainer;
using fault::Trainers;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
// All loopback addresses belong to this machine, so anyone may call from any of them.
constexpr char kAttackersAddress[] = "127.0.0.9";
// Why the daemon ends a connection whose headers, calls, or bytes without use are too many.
constexpr char kCallerHarms[] =
    "its caller exceeds a limit: bytes without a call or message, bytes that are no data, calls, "
    "resets, or the length of headers";

std::size_t DescriptorsOf(const TestDaemon& daemon) {
  const std::filesystem::directory_iterator all("/proc/" + std::to_string(daemon.pid()) + "/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

// Nodes alpha and beta with a job, and node gamma. The daemons may have few descriptors.
class PeerPort : public testing::Test {
 protected:
  static constexpr std::size_t kDescriptors = 1024;
  static std::vector<std::string> FewDescriptors() {
    const std::string few = std::to_string(kDescriptors);
    return {"/usr/bin/prlimit", "--nofile=" + few + ":" + few};
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
  const std::size_t before_attack = DescriptorsOf(alpha_);
  std::atomic<bool> stop{false}, full{false};
  // As many as it can get, and a new one for each that the daemon closes.
  std::thread attacker([&] {
    std::vector<Descriptor> connections(1500);
    while (!stop) {
      for (Descriptor& one : connections) {
        char byte = 0;
        const bool closed =
            one.get() < 0 || recv(one.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
        if (closed) one = ConnectTcp(peer, kAttackersAddress);
        if (stop) break;
      }
      full = true;
    }
  });
  while (!full) ExpectAll(innocent_, "step");
  // One address may have a quarter of what all callers may have.
  EXPECT_LT(DescriptorsOf(alpha_), before_attack + kDescriptors / 4);
  ExpectUnharmed();
  stop = true;
  attacker.join();
  setrlimit(RLIMIT_NOFILE, &before);
}

// gRPC reads a connection that it is given until there is nothing to read for a moment.
TEST_F(PeerPort, ConnectionsThatSendWithoutAPauseLetOthersIn) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> attackers;
  for (int i = 0; i < 3; ++i) {
    attackers.emplace_back([&stop, peer = alpha_.Status().peer_address()] {
      while (!stop) {
        RawHttp2 connection(ConnectTcp(peer, kAttackersAddress), 65535);
        while (!stop && connection.connected() && connection.SendNothings()) {
        }
      }
    });
  }
  ExpectUnharmed();
  stop = true;
  for (std::thread& attacker : attackers) attacker.join();
}

TEST_F(PeerPort, ConnectionThatSendsWithoutHelloEnds) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer is too slow: the connection sends too little";
  const std::string peer = alpha_.Status().peer_address();
  const std::uint64_t give_up_ns = NowNs() + std::uint64_t{kPatienceMs} * 1'000'000;
  // The first one may end for another reason: it keeps others from being accepted.
  std::string log;
  while (log.find("sends much, and has not said Hello") == std::string::npos) {
    ASSERT_LT(NowNs(), give_up_ns) << log;
    RawHttp2 connection(ConnectTcp(peer, kAttackersAddress), 65535);
    // 0.9 MB in a second: with more than 2 MiB it would end because of what is no data.
    while (connection.connected() && connection.SendNothings() && NowNs() < give_up_ns) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the pace of the attack
    }
    log = alpha_.Log();
  }
  ExpectUnharmed();
}

// gRPC holds a message whole before it compares its length with the limit.
TEST_F(PeerPort, MessagesThatDoNotEndTakeLittleMemory) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer is too slow: the connections send too little";
  constexpr int kConnections = 32;
  constexpr int kPieces = 1200;  // of 16 KiB
  const std::uint64_t before = MemoryBytes(alpha_.pid(), "VmHWM");
  std::vector<std::thread> attackers;
  for (int i = 0; i < kConnections; ++i) {
    attackers.emplace_back([peer = alpha_.Status().peer_address()] {
      RawHttp2 connection(ConnectTcp(peer, kAttackersAddress), 65535);
      connection.BeginMessage("/gradsync.v1.Peer/Attach", 1u << 30);
      for (int sent = 0; sent < kPieces && connection.ContinueMessage(); ++sent) {
        std::this_thread::sleep_for(std::chrono::milliseconds(4));  // the pace of the attack
      }
    });
  }
  for (std::thread& attacker : attackers) attacker.join();
  EXPECT_LT(MemoryBytes(alpha_.pid(), "VmHWM"), before + 256 * kMiB);
  ExpectUnharmed();
}

// gRPC keeps up to 10,000 answers of a connection that reads none. Trainers send pings no faster
// than they may. Those who send faster, here to the peer port, may lose their connection.
TEST_F(PeerPort, PingsWhoseAnswersNobodyReadsTakeLittleMemory) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  constexpr int kConnections = 32;
  const std::uint64_t before = MemoryBytes(alpha_.pid(), "VmHWM");
  const std::string peer = alpha_.Status().peer_address();
  std::vector<RawHttp2> peers, trainers;
  std::atomic<int> stalled{0};
  std::vector<std::thread> attackers;
  for (int i = 0; i < kConnections; ++i) {
    peers.emplace_back(ConnectTcp(peer, kAttackersAddress), 65535);
    trainers.emplace_back(alpha_.socket(), 65535);
  }
  for (int i = 0; i < kConnections; ++i) {
    attackers.emplace_back([&connection = peers[i]] {
      while (connection.SendPings(1000)) {
      }
    });
    attackers.emplace_back([&, i] { stalled += trainers[i].PingUntilStalled() ? 1 : 0; });
  }
  for (std::thread& attacker : attackers) attacker.join();
  EXPECT_GT(stalled, 0) << "gRPC reads the pings of every trainer";
  EXPECT_LT(MemoryBytes(alpha_.pid(), "VmHWM"), before + 2 * kConnections * kMiB);
  ExpectUnharmed();
}

TEST_F(PeerPort, ConnectionThatCallsAnUnknownMethodEnds) {
  Descriptor connection = ConnectTcp(alpha_.Status().peer_address(), kAttackersAddress);
  const Descriptor reader(dup(connection.get()));
  RawHttp2 client(std::move(connection), 65535);
  ASSERT_TRUE(client.Call("/no.Service/Method", ""));
  std::string answer;
  char bytes[4096];
  ssize_t got = 0;
  do {
    ASSERT_TRUE(AwaitReadable(reader.get(), kPatienceMs));
    got = recv(reader.get(), bytes, sizeof(bytes), 0);
    if (got > 0) answer.append(bytes, static_cast<std::size_t>(got));
  } while (got > 0);
  EXPECT_NE(answer.find("grpc-status"), std::string::npos) << "it is answered first";
  ExpectUnharmed();
}

TEST_F(PeerPort, ConnectionWithoutAHandshakeEnds) {
  const Descriptor silent = ConnectTcp(alpha_.Status().peer_address(), kAttackersAddress);
  char bytes[4096];
  ssize_t got = 0;
  do {
    ASSERT_TRUE(AwaitReadable(silent.get(), kPatienceMs));
    got = read(silent.get(), bytes, sizeof(bytes));  // first the daemon's own settings
  } while (got > 0);
  EXPECT_EQ(got, 0) << "closed";
  ExpectUnharmed();
}

// ---- Streams without Hello

// The daemon ends a connection with more than 64 calls.
constexpr std::size_t kStreamsPerConnection = 60;

// Streams that say nothing.
class SilentStreams {
 public:
  SilentStreams(const std::string& from, const std::string& to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      if (i % kStreamsPerConnection == 0) {
        stubs_.push_back(v1::Peer::NewStub(
            grpc::CreateInsecureChannelFromFd("peer", dup(ConnectTcp(to, from).get()))));
      }
      streams_.push_back(std::make_unique<Silent>());
      streams_.back()->stub = stubs_.back().get();
    }
    // All at once.
    for (const auto& silent : streams_) {
      silent->reader = std::thread([this, one = silent.get()] {
        one->stream = one->stub->Attach(&one->context);
        AwaitEnd(one);
      });
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return begun_ == streams_.size(); });
  }
  ~SilentStreams() {
    for (const auto& silent : streams_) silent->context.TryCancel();
    for (const auto& silent : streams_) silent->reader.join();
  }

  // How many the daemon has refused because others are newer. Waits until there are `count`, or all
  // have ended: then the time for Hello has passed.
  std::size_t AwaitRefused(std::size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return refused_ == count || ended_ == streams_.size(); });
    return refused_;
  }
  // Whether all end.
  bool AwaitEnds() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(kPatienceMs),
                             [&] { return ended_ == streams_.size(); });
  }

 private:
  struct Silent {
    v1::Peer::Stub* stub = nullptr;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream;
    std::thread reader;
  };

  void AwaitEnd(Silent* silent) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++begun_;
      changed_.notify_all();
    }
    v1::AttachResponse message;
    while (silent->stream->Read(&message)) {
    }
    const grpc::Status end = silent->stream->Finish();
    const bool quota = end.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
                       end.error_message().find("newer streams without Hello") != std::string::npos;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++ended_;
    if (quota) ++refused_;
    changed_.notify_all();
  }

  std::vector<std::unique_ptr<v1::Peer::Stub>> stubs_;  // constant once constructed
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t begun_ = 0, refused_ = 0, ended_ = 0;
  std::vector<std::unique_ptr<Silent>> streams_;
};

TEST_F(PeerPort, StreamsOfOneAddressWithoutHelloAreFewAndEnd) {
  constexpr std::size_t kMost = 64, kMore = 20;
  const std::string peer = alpha_.Status().peer_address();
  SilentStreams neighbours("127.0.0.10", peer, kMost);
  SilentStreams attackers(kAttackersAddress, peer, kMost + kMore);
  EXPECT_EQ(attackers.AwaitRefused(kMore), kMore);
  ExpectUnharmed();
  EXPECT_TRUE(attackers.AwaitEnds()) << "the time for Hello has passed";
  EXPECT_TRUE(neighbours.AwaitEnds());
  EXPECT_EQ(attackers.AwaitRefused(kMore), kMore);
  EXPECT_EQ(neighbours.AwaitRefused(0), 0u) << "they are at another address";
}

// ---- Streams with Hello

v1::AttachRequest HelloOf(const std::string& job_id) {
  v1::AttachRequest message;
  v1::Hello& hello = *message.mutable_hello();
  hello.set_protocol(1);
  hello.set_instance(std::string(16, 'x'));
  hello.set_node_name("attacker");
  hello.set_uid(getuid());
  hello.set_job_id(job_id);
  hello.set_staging_bytes(32u << 20);
  return message;
}

// Streams from one address that have said Hello, each for a job of its own. They answer pings only
// while Open() and Ask() are called. Afterwards they last a few seconds.
class GreetedStreams {
 public:
  GreetedStreams(std::string from, std::string to) : from_(std::move(from)), to_(std::move(to)) {}
  ~GreetedStreams() {
    for (const auto& one : streams_) one->context.TryCancel();
    for (const auto& one : streams_) {
      v1::AttachResponse message;
      while (!one->ended && one->stream->Read(&message)) {
      }
      if (!one->ended) one->stream->Finish();
    }
  }

  // Opens one more. Returns the error that ends it, or OK if the daemon welcomes it.
  grpc::Status Open(uid_t user = getuid()) {
    AnswerPings();
    if (streams_.size() % kStreamsPerConnection == 0) {
      stubs_.push_back(v1::Peer::NewStub(
          grpc::CreateInsecureChannelFromFd("peer", dup(ConnectTcp(to_, from_).get()))));
    }
    streams_.push_back(std::make_unique<Greeted>());
    Greeted& one = *streams_.back();
    one.stream = stubs_.back()->Attach(&one.context);
    v1::AttachRequest hello = HelloOf(JobOfNewest());
    hello.mutable_hello()->set_uid(user);
    one.stream->Write(hello);
    v1::AttachResponse answer;
    if (one.stream->Read(&answer)) return grpc::Status::OK;
    one.ended = true;
    return one.stream->Finish();
  }
  std::string JobOfNewest() const { return "attack" + std::to_string(streams_.size()); }
  // Sends a message on the newest stream. False: the stream has ended.
  bool Send(const v1::AttachRequest& message) { return streams_.back()->stream->Write(message); }
  // Sends a request of rank 0 on the newest stream, and waits for an answer. Not set: the stream
  // has ended.
  v1::SessionResponse Ask(const v1::SessionRequest& request) {
    v1::AttachRequest message;
    message.mutable_rank_request()->set_incarnation(1);
    *message.mutable_rank_request()->mutable_request() = request;
    v1::AttachResponse answer;
    for (bool may = Send(message); may && streams_.back()->stream->Read(&answer);) {
      AnswerPings();  // at least a ping comes each second
      if (answer.has_rank_response()) return answer.rank_response().response();
    }
    return {};
  }

 private:
  struct Greeted {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream;
    bool ended = false;
  };

  // At most once a second, sends a Pong on every stream.
  void AnswerPings() {
    const std::uint64_t now_ns = NowNs();
    if (now_ns < answered_ns_ + 1'000'000'000) return;
    answered_ns_ = now_ns;
    v1::AttachRequest pong;
    pong.mutable_pong();
    for (const auto& one : streams_) {
      if (!one->ended) one->stream->Write(pong);
    }
  }

  const std::string from_, to_;
  std::vector<std::unique_ptr<v1::Peer::Stub>> stubs_;
  std::vector<std::unique_ptr<Greeted>> streams_;
  std::uint64_t answered_ns_ = 0;
};

TEST_F(PeerPort, ConnectionThatHasSaidHelloMaySendMuch) {
  GreetedStreams node(kAttackersAddress, alpha_.Status().peer_address());
  ASSERT_TRUE(node.Open().ok());
  // Much more than without Hello, and for longer than the daemon looks on. The rank does not exist,
  // so the message means nothing.
  v1::AttachRequest message;
  message.mutable_rank_ended()->set_incarnation(1);
  message.mutable_rank_ended()->mutable_status()->set_code(1);
  message.mutable_rank_ended()->mutable_status()->set_message(std::string(32 << 10, 'x'));
  const std::uint64_t until_ns = NowNs() + 1'500'000'000;
  std::uint64_t sent = 0;
  while (NowNs() < until_ns || sent < 16 * kMiB) {
    ASSERT_TRUE(node.Send(message)) << "the stream has ended after " << sent << " bytes";
    sent += message.ByteSizeLong();
  }
  EXPECT_EQ(alpha_.Log().find("peer port: connection ended"), std::string::npos) << alpha_.Log();
}

// gRPC keeps all headers of a call until they end.
TEST_F(PeerPort, ConnectionThatHasSaidHelloMaySendNoHeadersWithoutEnd) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer is too slow: the connection sends too little";
  constexpr int kMostMiB = 512;
  Descriptor connection = ConnectTcp(alpha_.Status().peer_address(), kAttackersAddress);
  const Descriptor reader(dup(connection.get()));
  RawHttp2 client(std::move(connection), 65535);
  ASSERT_TRUE(client.Begin("/gradsync.v1.Peer/Attach", HelloOf("attack").SerializeAsString()));
  for (std::string answer; answer.find("alpha") == std::string::npos;) {  // its Welcome
    ASSERT_TRUE(AwaitReadable(reader.get(), kPatienceMs));
    char bytes[4096];
    const ssize_t got = recv(reader.get(), bytes, sizeof(bytes), 0);
    ASSERT_GT(got, 0);
    answer.append(bytes, static_cast<std::size_t>(got));
  }
  client.BeginHeaders("/gradsync.v1.Peer/Attach");
  for (int sent = 1; sent < kMostMiB && client.ContinueHeaders(); ++sent) {
  }
  EXPECT_FALSE(client.connected());
  EXPECT_TRUE(Soon([this] {  // the line follows the end
    return alpha_.Log().find(kCallerHarms) != std::string::npos;
  })) << alpha_.Log();
  ExpectUnharmed();
}

TEST_F(PeerPort, StreamsOfOneAddressWithHelloAreFew) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer is too slow: the first streams would have ended";
  constexpr int kMost = 256;
  const std::string peer = alpha_.Status().peer_address();
  GreetedStreams attackers(kAttackersAddress, peer);
  grpc::Status end;
  int welcome = 0;
  while (welcome < 2 * kMost && (end = attackers.Open()).ok()) ++welcome;
  // The daemon counts a stream a moment after its Welcome.
  EXPECT_GE(welcome, kMost);
  EXPECT_LE(welcome, kMost + 2);
  EXPECT_EQ(end.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(end.error_message().find("256 streams of 127.0.0.9, as many as one address may have"),
            std::string::npos)
      << end.error_message();
  GreetedStreams neighbour("127.0.0.10", peer);
  EXPECT_TRUE(neighbour.Open().ok()) << "it is at another address";
  ExpectUnharmed();
}

// A node says which user pays, and may name many.
TEST(UsersOfOneAddress, HaveLittleMemoryTogether) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  constexpr int kUsers = 16, kLayouts = 4;
  const TestDaemon daemon(
      fault::TwoNodes::Flags("127.0.0.1", "alpha", {"--quota_control_bytes_per_user=8MiB"}));
  GreetedStreams attackers(kAttackersAddress, daemon.Status().peer_address());
  const std::uint64_t before = MemoryBytes(daemon.pid(), "VmHWM");
  int registered = 0;
  std::string refusal;
  for (uid_t user = 1; user <= kUsers; ++user) {
    ASSERT_TRUE(attackers.Open(user).ok()) << user;
    const auto opened =
        attackers.Ask(fault::RawSession::OpenRequest(0, 1, attackers.JobOfNewest()));
    for (int i = 0; i < kLayouts && opened.has_session_opened(); ++i) {
      v1::SessionRequest layout =
          fault::RawSession::LayoutRequest(4096, 1, "layout" + std::to_string(i));
      const v1::SessionResponse answer = attackers.Ask(layout);
      if (answer.has_layout_assigned()) ++registered;
      if (answer.has_operation_failed()) refusal = answer.operation_failed().status().message();
    }
  }
  const std::uint64_t cost = MemoryBytes(daemon.pid(), "VmHWM") - before;
  std::cout << registered << " layouts, " << before / kMiB << " MiB before, " << cost / kMiB
            << " MiB more" << std::endl;
  EXPECT_NE(refusal.find("the nodes of 127.0.0.9 make this daemon keep"), std::string::npos)
      << refusal;
  EXPECT_LT(cost, 48 * kMiB);
}

// ---- Calls that are reset at once (CVE-2023-44487)

class ResetCalls : public PeerPort, public testing::WithParamInterface<std::string> {};

INSTANTIATE_TEST_SUITE_P(Of, ResetCalls,
                         testing::Values("/gradsync.v1.Peer/Attach", "/no.Service/Method"),
                         [](const auto& tested) {
                           return tested.index == 0 ? "Attach" : "AMethodThatDoesNotExist";
                         });

TEST_P(ResetCalls, TakeLittleMemory) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  const std::string peer = alpha_.Status().peer_address();
  // The daemon looks at each connection to find the busiest ones.
  std::vector<RawHttp2> idle;
  for (int i = 0; i < 500; ++i) idle.emplace_back(ConnectTcp(peer, "127.0.0.11"), 65535);
  // Without a limit it is gigabytes after some seconds, and the daemon ends here.
  const rlimit most{rlim_t{5} << 30, rlim_t{5} << 30};
  ASSERT_EQ(prlimit(alpha_.pid(), RLIMIT_AS, &most, nullptr), 0);
  const std::uint64_t before = MemoryBytes(alpha_.pid(), "VmHWM");
  std::atomic<bool> stop{false};
  std::vector<std::thread> attackers;
  for (int i = 0; i < 8; ++i) {
    attackers.emplace_back([&] {
      RawHttp2 connection(ConnectTcp(peer, kAttackersAddress), 65535);
      while (!stop) {
        if (!connection.connected()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the pace of the attack
          connection = RawHttp2(ConnectTcp(peer, kAttackersAddress), 65535);
        }
        connection.OpenAndReset(GetParam(), 100);
      }
    });
  }
  const std::uint64_t until_ns = NowNs() + 3'000'000'000;
  while (NowNs() < until_ns && !HasFailure()) ExpectAll(innocent_, "step times=10");
  ExpectUnharmed();
  stop = true;
  for (std::thread& attacker : attackers) attacker.join();
  const std::uint64_t cost = MemoryBytes(alpha_.pid(), "VmHWM") - before;
  std::cout << before / kMiB << " MiB before, " << cost / kMiB << " MiB more" << std::endl;
  EXPECT_LT(cost, 64 * kMiB);
  const std::string log = alpha_.Log();
  EXPECT_EQ(
      LoggedReasons(log, "peer port: connection ended address=127.0.0.9:").count(kCallerHarms), 1u)
      << log;
}

// ---- A coordinator that a trainer has chosen

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
  const std::size_t before = alpha_.Processes().size();
  Trainer attacker(alpha_, 1, 2, "attack", "coordinator=" + fake.address());
  const Reply refused = attacker.Join();
  EXPECT_EQ(refused.reason, "COORDINATOR_REFUSED") << refused;
  EXPECT_NE(refused.message.find("'connect_engine' before its Welcome"), std::string::npos)
      << refused;
  EXPECT_EQ(alpha_.Processes().size(), before) << "no engine was made";
  ExpectUnharmed();
}

// 16 MiB that would be 600 MiB.
TEST_F(PeerPort, ACoordinatorsMessageOfManyPartsTakesLittleMemory) {
  const v1::AttachResponse longest = FakeCoordinator::Longest();
  FakeCoordinator fake([&](FakeCoordinator::Stream* stream) {
    stream->Write(FakeCoordinator::Welcome());
    stream->Write(longest);
    FakeCoordinator::Await(stream, v1::AttachRequest::KIND_NOT_SET);
  });
  const std::uint64_t before = MemoryBytes(alpha_.pid(), "VmHWM");
  Trainer attacker(alpha_, 1, 2, "attack", "coordinator=" + fake.address());
  Trainer next(alpha_, 1, 2, "attack", "coordinator=" + fake.address());
  const Reply lost = attacker.Join();
  Reply paused = next.Join();  // at once: the pause lasts a second
  // On a slow machine it comes after the pause, and its coordinator does harm again. Then the next
  // pause lasts twice as long.
  for (int i = 0; i < 5 && paused.reason == "COORDINATOR_LOST"; ++i) {
    paused = Trainer(alpha_, 1, 2, "attack", "coordinator=" + fake.address()).Join();
  }
  EXPECT_EQ(lost.reason, "COORDINATOR_LOST") << lost;
  EXPECT_NE(lost.message.find("a message that takes too much memory"), std::string::npos) << lost;
  EXPECT_EQ(paused.reason, "QUOTA") << paused;
  ExpectUnharmed();
  const std::uint64_t cost = MemoryBytes(alpha_.pid(), "VmHWM") - before;
  std::cout << before / kMiB << " MiB before, " << cost / kMiB << " MiB more" << std::endl;
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  EXPECT_LT(cost, 64 * kMiB);
}

// What a coordinator sends that is no message.
struct Frames {
  const char* name;
  std::function<bool(RawHttp2*)> send;
};

constexpr char kHarm[] = "it sends too many bytes that are no message";

class CoordinatorsFrames : public PeerPort, public testing::WithParamInterface<Frames> {
 protected:
  // A program that a trainer of alpha has chosen as its coordinator.
  struct Chosen {
    explicit Chosen(const TestDaemon& daemon) : trainer(daemon.socket()) {
      v1::SessionRequest open = fault::RawSession::OpenRequest(1, 2, "attack");
      open.mutable_open_session()->set_coordinator(address);
      trainer.Send(open);
    }

    std::string address;
    const Descriptor listener = ListenTcp("127.0.0.8", &address);
    fault::RawSession trainer;
  };
};

// Before its Welcome, and after it.
TEST_P(CoordinatorsFrames, TakeLittleMemoryAndHarmNobody) {
  const std::uint64_t before = MemoryBytes(alpha_.pid(), "VmHWM");
  for (const bool welcomes : {false, true}) {
    Chosen chosen(alpha_);
    RawHttp2 coordinator = RawHttp2::Server(AcceptOne(chosen.listener, kPatienceMs));
    ASSERT_TRUE(coordinator.connected()) << "the daemon has connected";
    if (welcomes) {
      ASSERT_TRUE(coordinator.AwaitCall());
      coordinator.Begin("", FakeCoordinator::Welcome().SerializeAsString());
      const auto attached = [this] {
        return alpha_.Log().find("attached to coordinator job=attack") != std::string::npos;
      };
      ASSERT_TRUE(Soon(attached));
    }
    while (coordinator.connected()) GetParam().send(&coordinator);
    const fault::RawStatus end = chosen.trainer.End();
    EXPECT_EQ(end.reason, welcomes ? "COORDINATOR_LOST" : "COORDINATOR_REFUSED") << end;
    EXPECT_NE(end.message.find(kHarm), std::string::npos) << end;
    EXPECT_TRUE(Soon([&] {
      const Chosen again(alpha_);
      return AcceptOne(again.listener, /*timeout_ms=*/200).get() >= 0;
    })) << "the user may try again after a second or two";
    ExpectUnharmed();
  }
  const std::uint64_t cost = MemoryBytes(alpha_.pid(), "VmHWM") - before;
  std::cout << before / kMiB << " MiB before, " << cost / kMiB << " MiB more" << std::endl;
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  EXPECT_LT(cost, 64 * kMiB);
}

TEST_P(CoordinatorsFrames, EndWithTheTrainersSession) {
  auto chosen = std::make_unique<Chosen>(alpha_);
  RawHttp2 coordinator = RawHttp2::Server(AcceptOne(chosen->listener, kPatienceMs));
  ASSERT_TRUE(coordinator.connected()) << "the daemon has connected";
  chosen = nullptr;
  const std::uint64_t give_up_ns = NowNs() + std::uint64_t{kPatienceMs} * 1'000'000;
  while (coordinator.connected()) {
    GetParam().send(&coordinator);
    ASSERT_LT(NowNs(), give_up_ns);
  }
}

INSTANTIATE_TEST_SUITE_P(
    PeerPort, CoordinatorsFrames,
    testing::Values(Frames{"Headers",
                           [](RawHttp2* daemon) {
                             return daemon->BeginHeaders("") && daemon->ContinueHeaders();
                           }},
                    Frames{"Nothings", [](RawHttp2* daemon) { return daemon->SendNothings(); }},
                    Frames{"LongNothings", [](RawHttp2* daemon) { return daemon->SendBulk(); }},
                    Frames{"Pings", [](RawHttp2* daemon) { return daemon->SendPings(1000); }}),
    [](const auto& one) { return one.param.name; });

// A coordinator that says nothing, and one that answers no trainer.
TEST(SlowCoordinator, KeepsNoQuotaOfTrainersThatGaveUp) {
  for (const bool welcomes : {false, true}) {
    FakeCoordinator fake([welcomes](FakeCoordinator::Stream* stream) {
      if (welcomes) stream->Write(FakeCoordinator::Welcome());
      v1::AttachRequest message;
      while (stream->Read(&message)) {
        // As a coordinator does that waits for the rank's memory.
        if (!welcomes || !message.has_rank_ended()) continue;
        v1::AttachResponse end;
        end.mutable_rank_response()->set_incarnation(message.rank_ended().incarnation());
        end.mutable_rank_response()->mutable_response()->mutable_session_ending();
        stream->Write(end);
      }
    });
    const TestDaemon daemon(
        fault::TwoNodes::Flags("127.0.0.1", "alpha", {"--quota_sessions_per_user=2"}));
    const auto join = [&daemon] { return Trainer(daemon, 0, 1, "own").Join(); };
    {
      std::deque<fault::RawSession> gave_up;
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        v1::SessionRequest request = fault::RawSession::OpenRequest(rank, 3, "attack");
        request.mutable_open_session()->set_coordinator(fake.address());
        request.mutable_open_session()->set_timeout_ms(600'000);
        ASSERT_TRUE(gave_up.emplace_back(daemon.socket()).Send(request));
      }
      EXPECT_TRUE(Soon([&] { return join().reason == "QUOTA"; })) << "they wait";
    }
    EXPECT_TRUE(Soon([&] { return join().ok(); })) << welcomes;
  }
}

// Messages that a trainer sends on wait in the daemon, and take four times as much memory there.
TEST_F(PeerPort, ACoordinatorThatDoesNotReadTakesLittleMemory) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  std::promise<void> stop;
  FakeCoordinator fake([stopped = stop.get_future().share()](FakeCoordinator::Stream* stream) {
    FakeCoordinator::Await(stream, v1::AttachRequest::kHello);
    stream->Write(FakeCoordinator::Welcome());
    const v1::AttachRequest open = FakeCoordinator::Await(stream, v1::AttachRequest::kRankRequest);
    v1::AttachResponse answer;
    answer.mutable_rank_response()->set_incarnation(open.rank_request().incarnation());
    answer.mutable_rank_response()->mutable_response()->mutable_session_opened()->set_protocol(1);
    answer.mutable_rank_response()->mutable_response()->mutable_session_opened()->set_generation(1);
    stream->Write(answer);
    // It is not silent, but reads nothing more.
    answer.mutable_ping()->set_number(1);
    while (stopped.wait_for(std::chrono::seconds(1)) != std::future_status::ready &&
           stream->Write(answer)) {
    }
  });
  fault::RawSession attacker(alpha_.socket());
  v1::SessionRequest request = fault::RawSession::OpenRequest(1, 2, "attack");
  request.mutable_open_session()->set_coordinator(fake.address());
  ASSERT_TRUE(attacker.Send(request));
  ASSERT_TRUE(attacker.Await(v1::SessionResponse::kSessionOpened).has_value());
  const std::uint64_t before = MemoryBytes(alpha_.pid(), "VmHWM");
  request.mutable_bucket_ready()->set_channel(1);
  request.mutable_bucket_ready()->set_step(1);
  request.mutable_bucket_ready()->mutable_buckets()->Resize(60'000, 1);
  // 260 MiB on the wire.
  for (int i = 0; i < 4500 && attacker.Send(request); ++i) {
  }
  const fault::RawStatus lost = attacker.End();
  EXPECT_EQ(lost.reason, "COORDINATOR_LOST") << lost;
  EXPECT_NE(lost.message.find("it was disconnected: it left"), std::string::npos) << lost;
  const std::uint64_t cost = MemoryBytes(alpha_.pid(), "VmHWM") - before;
  std::cout << before / kMiB << " MiB before, " << cost / kMiB << " MiB more" << std::endl;
  EXPECT_LT(cost, 400 * kMiB);
  ExpectUnharmed();
  stop.set_value();
}

// gRPC holds a message whole before it compares its length with the limit.
TEST_F(PeerPort, ACoordinatorsLongMessageTakesLittleMemory) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer needs memory itself";
  FakeCoordinator fake([](FakeCoordinator::Stream* stream) {
    v1::AttachRequest message;
    stream->Read(&message);  // Hello
    stream->Write(FakeCoordinator::Welcome());
    v1::AttachResponse large;
    large.mutable_rendezvous_value()->set_value(std::string(400 * kMiB, 'x'));
    stream->Write(large);
    while (stream->Read(&message)) {
    }
  });
  const std::uint64_t before = MemoryBytes(alpha_.pid(), "VmHWM");
  Trainer attacker(alpha_, 1, 2, "attack", "coordinator=" + fake.address());
  const Reply lost = attacker.Join();
  EXPECT_EQ(lost.reason, "COORDINATOR_LOST") << lost;
  const std::uint64_t cost = MemoryBytes(alpha_.pid(), "VmHWM") - before;
  std::cout << before / kMiB << " MiB before, " << cost / kMiB << " MiB more" << std::endl;
  EXPECT_LT(cost, 200 * kMiB);
  ExpectUnharmed();
}

TEST_F(PeerPort, ACoordinatorHasAFewEnginesAtATime) {
  constexpr int kMost = 4;
  std::atomic<int> refused{0};
  std::atomic<std::size_t> most{0};
  FakeCoordinator fake([&](FakeCoordinator::Stream* stream) {
    v1::AttachRequest message;
    stream->Read(&message);  // Hello
    stream->Write(FakeCoordinator::Welcome());
    std::uint64_t asked = 0;
    // Each engine that is refused is answered at once.
    while (refused < 20 && FakeCoordinator::AskUntilRefused(stream, &asked)) {
      most = std::max(most.load(), alpha_.Processes().size());
      ++refused;
    }
  });
  const std::size_t before = alpha_.Processes().size();
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
