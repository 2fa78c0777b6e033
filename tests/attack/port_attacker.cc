// Attacks what attacker.cc does not: a daemon's peer port, its side socket, and the memory that it
// shares with trainers. Until standard input ends.
//
//   port_attacker --attack=NAME --socket=PATH --peer=HOST:PORT [--uid=N]
//   port_attacker --list     prints the names of all attacks
//
// It prints READY when the attack is at its full strength, and goes on. It never fails for what the
// daemon refuses: that is the daemon's defence. tests/attack and tools/soak run it beside innocent
// jobs. The attacks are in Attacks(), at the end.
//
// Attacks on the peer port come from an address of their own, as another machine's would, and keep
// this process's user: without TLS the daemon refuses other users of its own machine.

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gradsync/shared_memory.h"
#include "gradsync/v1/peer.grpc.pb.h"
#include "tests/attack/raw_http2.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/become_user.h"
#include "tests/kit/child_process.h"

namespace gradsync::attack {
namespace {

// All loopback addresses belong to this machine, so anyone may call from any of them.
constexpr char kOwnAddress[] = "127.0.0.9";
constexpr std::chrono::milliseconds kPace(1);  // between two attempts that may fail

struct Target {
  std::string socket;
  std::string side_socket;
  std::string peer;
  std::uint32_t user = 0;  // in whose name it says Hello
};

void Ready() { std::cout << "READY" << std::endl; }

void RaiseDescriptorLimit() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Runs `round` over and over on each of so many threads. Says READY when each has run it once.
[[noreturn]] void Repeat(int threads, const std::function<void(int thread)>& round) {
  std::atomic<int> begun{0};
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      round(thread);
      if (++begun == threads) Ready();
      for (;;) round(thread);
    });
  }
  for (;;) pause();
}

// As many connections as it can get, up to `count`, and a new one for each that the daemon closes.
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

// ---- The peer port

sockaddr_in AddressOf(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  return address;
}

// Invalid: it was refused.
Descriptor CallPeer(const Target& target) {
  const std::size_t colon = target.peer.rfind(':');
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in from = AddressOf(kOwnAddress, 0);
  const sockaddr_in to =
      AddressOf(target.peer.substr(0, colon), std::stoi(target.peer.substr(colon + 1)));
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&from), sizeof(from)) != 0 ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) {
    return Descriptor();
  }
  return fd;
}

void PeerConnections(const Target& target) {
  HoldConnections(1500, [&] { return CallPeer(target); });
}

// Connects again when the daemon has ended a connection.
void OnPeerConnections(const Target& target, int connections,
                       const std::function<void(RawHttp2*)>& act) {
  std::vector<std::unique_ptr<RawHttp2>> open(static_cast<std::size_t>(connections));
  Repeat(connections, [&](int thread) {
    auto& connection = open[static_cast<std::size_t>(thread)];
    if (connection == nullptr || !connection->connected()) {
      if (connection != nullptr) std::this_thread::sleep_for(kPace);
      connection = std::make_unique<RawHttp2>(CallPeer(target), 65535);
    }
    if (connection->connected()) act(connection.get());
  });
}

// Opens calls and resets them at once, as fast as it can (CVE-2023-44487).
void PeerReset(const Target& target, const std::string& method) {
  OnPeerConnections(target, 8,
                    [&](RawHttp2* connection) { connection->OpenAndReset(method, 100); });
}

// Sends frames that mean nothing.
void PeerNothings(const Target& target) {
  OnPeerConnections(target, 2, [](RawHttp2* connection) { connection->SendNothings(); });
}

// More streams than one address may have. Each says Hello, or nothing, and then no more; again
// whenever the daemon has ended it.
void PeerStreams(const Target& target, bool greet) {
  constexpr int kStreams = 84;
  std::atomic<int> begun{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kStreams; ++i) {
    threads.emplace_back([&, i] {
      v1::AttachRequest message;
      v1::Hello& hello = *message.mutable_hello();
      hello.set_protocol(1);
      hello.set_instance(std::string(16, 'x'));
      hello.set_node_name("attacker");
      hello.set_uid(target.user);
      hello.set_job_id("attack" + std::to_string(i));
      hello.set_staging_bytes(32u << 20);
      for (bool first = true;; first = false) {
        const Descriptor fd = CallPeer(target);
        if (fd.get() < 0) {
          if (first && ++begun == kStreams) Ready();
          std::this_thread::sleep_for(kPace);
          continue;
        }
        const auto stub =
            v1::Peer::NewStub(grpc::CreateInsecureChannelFromFd("peer", dup(fd.get())));
        grpc::ClientContext context;
        const auto stream = stub->Attach(&context);
        if (greet) stream->Write(message);
        if (first && ++begun == kStreams) Ready();
        v1::AttachResponse answer;
        while (stream->Read(&answer)) {
        }
        stream->Finish();
      }
    });
  }
  for (;;) pause();
}

// ---- The side socket

// Invalid: it was refused.
Descriptor CallSideSocket(const Target& target) {
  Descriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, target.side_socket.c_str(), target.side_socket.size() + 1);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return Descriptor();
  }
  return fd;
}

// They say nothing.
void SideConnections(const Target& target) {
  HoldConnections(2000, [&] { return CallSideSocket(target); });
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

// ---- Shared memory

// Frees the pages of its arena all the time, while it maps it, while the daemon checks it and in a
// step. Begins again when the daemon has ended the session.
void PunchedHoles(const Target& target) {
  Repeat(4, [&](int thread) {
    fault::RawSession rank(target.socket);
    if (!rank.Open(0, 1, "holes" + std::to_string(thread)).has_value()) return;
    const auto assigned = rank.Register(fault::RawSession::LayoutRequest(4, 1 << 20));
    if (!assigned.has_value()) return;
    const auto arena = rank.Map(*assigned, target.side_socket, /*populate=*/false);
    if (arena == nullptr || arena->data() == nullptr) return;
    rank.semaphores()->Populate();
    std::atomic<bool> punching{true};
    std::thread puncher([&] {
      while (punching) {
        fallocate(arena->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  static_cast<off_t>(arena->size()));
      }
    });
    madvise(arena->data(), arena->size(), MADV_POPULATE_WRITE);
    if (thread % 2 == 0) arena->Seal();  // else the daemon may see that it is not sealed
    if (rank.Mapped(assigned->channel()) &&
        rank.Await(v1::SessionResponse::kLayoutReady).has_value() &&
        rank.EndStep(assigned->channel(), 1, /*ready_rest=*/true)) {
      rank.Await(v1::SessionResponse::kStepDone);
    }
    punching = false;
    puncher.join();
  });
}

struct Attack {
  bool on_peer_port;
  std::function<void(const Target&)> run;
};

const std::map<std::string, Attack>& Attacks() {
  static const auto* const attacks = new std::map<std::string, Attack>{
      {"peer_connections", {true, PeerConnections}},
      {"peer_reset_attach",
       {true, [](const Target& t) { PeerReset(t, "/gradsync.v1.Peer/Attach"); }}},
      {"peer_reset_unknown", {true, [](const Target& t) { PeerReset(t, "/no.Service/Method"); }}},
      {"peer_nothings", {true, PeerNothings}},
      {"peer_silent_streams", {true, [](const Target& t) { PeerStreams(t, /*greet=*/false); }}},
      {"peer_greeted_streams", {true, [](const Target& t) { PeerStreams(t, /*greet=*/true); }}},
      {"side_connections", {false, SideConnections}},
      {"side_requests", {false, SideRequests}},
      {"punched_holes", {false, PunchedHoles}},
  };
  return *attacks;
}

int Main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const std::size_t equals = flag.find('=');
    flags[flag.substr(0, equals)] = equals == std::string::npos ? "" : flag.substr(equals + 1);
  }
  if (flags.count("--list") > 0) {
    for (const auto& entry : Attacks()) std::cout << entry.first << "\n";
    return 0;
  }
  const auto found = Attacks().find(flags["--attack"]);
  if (found == Attacks().end()) {
    std::cerr << "port_attacker: --attack=NAME; --list prints the names" << std::endl;
    return 2;
  }
  const Attack& attack = found->second;
  Target target;
  target.socket = flags["--socket"];
  target.side_socket = target.socket.substr(0, target.socket.rfind(".sock")) + "-fd.sock";
  target.peer = flags["--peer"];
  if (attack.on_peer_port && target.peer.find(':') == std::string::npos) {
    std::cerr << "port_attacker: --peer=HOST:PORT" << std::endl;
    return 2;
  }
  if (!flags["--uid"].empty()) {
    target.user = static_cast<std::uint32_t>(std::stoul(flags["--uid"]));
    if (!attack.on_peer_port && !BecomeUser(target.user)) return 1;
  }
  std::thread([&] { attack.run(target); }).detach();
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  _exit(0);  // the attack may wait for the daemon
}

}  // namespace
}  // namespace gradsync::attack

int main(int argc, char** argv) { return gradsync::attack::Main(argc, argv); }
