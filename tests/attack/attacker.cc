// A user who attacks a daemon, until standard input ends.
//
//   attacker --attack=NAME --socket=PATH [--uid=N]
//   attacker --list     prints the names of all attacks
//
// It prints READY when the attack is at its full strength, and goes on. It never fails for what the
// daemon refuses: that is the daemon's defence. tests/attack and tools/soak run it beside innocent
// jobs. The attacks are in Attacks(), at the end.

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gradsync/v1/gradsync.grpc.pb.h"
#include "gradsync/v1/introspection.grpc.pb.h"
#include "tests/attack/raw_http2.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/become_user.h"
#include "tests/kit/child_process.h"

namespace gradsync::attack {
namespace {

// What an attack uses.
struct Target {
  std::string socket;
  std::string side_socket;
};

// Set when standard input has ended.
std::atomic<bool> stopping{false};
// Returns at the end of the attack.
void AwaitStop() {
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  stopping = true;
}

void Ready() { std::cout << "READY" << std::endl; }

std::shared_ptr<grpc::Channel> ConnectionTo(const Target& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel("unix:" + target.socket, grpc::InsecureChannelCredentials(),
                                   arguments);
}

// ---- Asking

// Opens streams of reflection and says nothing on them: 32 on each of four connections.
void ReflectionStreams(const Target& target) {
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> streams;
  grpc::CompletionQueue queue;
  for (int connection = 0; connection < 4; ++connection) {
    channels.push_back(ConnectionTo(target));
    channels.back()->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10));
    stubs.push_back(std::make_unique<grpc::GenericStub>(channels.back()));
    for (int stream = 0; stream < 32; ++stream) {
      contexts.push_back(std::make_unique<grpc::ClientContext>());
      streams.push_back(stubs.back()->PrepareCall(
          contexts.back().get(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
          &queue));
      streams.back()->StartCall(nullptr);
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
    }
  }
  Ready();
  AwaitStop();
  for (const auto& context : contexts) context->TryCancel();
  _exit(0);
}

// Asks everything that can be asked and reads no answer, with a window of 0 bytes; again whenever
// the daemon has ended a connection.
void ZeroWindow(const Target& target) {
  std::vector<std::unique_ptr<RawHttp2>> connections(32);
  const auto attack = [&] {
    for (auto& connection : connections) {
      if (connection != nullptr && connection->connected()) continue;
      connection = std::make_unique<RawHttp2>(target.socket, /*window=*/0);
      for (int i = 0; i < 8; ++i) {
        connection->Call("/gradsync.v1.Introspection/GetStatus", "");
        connection->Call("/gradsync.v1.Introspection/GetStats", "");
        connection->Call("/grpc.health.v1.Health/Check", "");
        connection->Call("/grpc.health.v1.Health/Watch", "");
      }
    }
  };
  attack();
  Ready();
  std::thread repeated([&] {
    while (!stopping) {
      for (auto& connection : connections) {
        if (connection->connected()) connection->Call("/gradsync.v1.Introspection/GetStatus", "");
      }
      attack();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the pace of the attack
    }
  });
  AwaitStop();
  repeated.join();
}

// Opens connections to a socket as fast as it can, keeps them, and replaces those that are closed.
void KeepConnections(const std::string& path, int type, std::size_t count) {
  std::vector<Descriptor> open(count);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const auto attack = [&] {
    for (Descriptor& one : open) {
      char byte = 0;
      const bool closed = one.get() < 0 || recv(one.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
      if (!closed) continue;
      one = Descriptor(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      // A full queue of the listener is a success too: nobody else gets in.
      if (connect(one.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
        one.Close();
      }
    }
  };
  attack();
  Ready();
  std::thread repeated([&] {
    while (!stopping) {
      attack();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the pace of the attack
    }
  });
  AwaitStop();
  repeated.join();
}

void Connections(const Target& target) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  KeepConnections(target.socket, SOCK_STREAM, 2000);
}

// As many clients of the side socket as a user may have. They ask nothing.
void SideClients(const Target& target) { KeepConnections(target.side_socket, SOCK_SEQPACKET, 64); }

// Asks for the status without a pause, on eight connections.
void StatusFlood(const Target& target) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto stub = v1::Introspection::NewStub(ConnectionTo(target));
      while (!stopping) {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
        v1::GetStatusResponse response;
        stub->GetStatus(&context, {}, &response);
      }
    });
  }
  Ready();
  AwaitStop();
  for (std::thread& thread : threads) thread.join();
}

// Opens calls and resets them at once, as fast as it can, on eight connections (CVE-2023-44487).
// Connects again when the daemon has ended one.
void RapidReset(const Target& target, const std::string& method) {
  constexpr int kConnections = 8;
  std::atomic<int> running{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kConnections; ++i) {
    threads.emplace_back([&] {
      auto connection = std::make_unique<RawHttp2>(target.socket, 65535);
      for (bool first = true; !stopping; first = false) {
        if (!connection->connected()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the pace of the attack
          connection = std::make_unique<RawHttp2>(target.socket, 65535);
        }
        connection->OpenAndReset(method, 100);
        if (first && ++running == kConnections) Ready();
      }
    });
  }
  AwaitStop();
  _exit(0);  // a connection may wait for the daemon
}

// The same, but each connection sends what its buffer takes, and then no more. The daemon's accept
// loop sees its end while gRPC still reads it.
void ResetAndClose(const Target& target, const std::string& method) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      std::deque<RawHttp2> closed;
      while (!stopping) {
        closed.emplace_back(target.socket, 65535).ResetAndClose(method);
        if (closed.size() > 60) closed.pop_front();
      }
    });
  }
  Ready();
  AwaitStop();
  _exit(0);  // a connection may wait for the daemon
}

// Sends frames that mean nothing, on two connections, for as long as the daemon reads them.
void Nothings(const Target& target) {
  std::atomic<int> running{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      auto connection = std::make_unique<RawHttp2>(target.socket, 65535);
      for (int sent = 0; !stopping; ++sent) {
        if (!connection->SendNothings()) {
          connection = std::make_unique<RawHttp2>(target.socket, 65535);
        }
        if (sent == 10 && ++running == 2) Ready();
      }
    });
  }
  AwaitStop();
  _exit(0);  // a connection may wait for the daemon
}

// Sends 3 GiB of long frames that mean nothing without a pause, lets the daemon read all of it, and
// goes on. gRPC 1.51 makes room for as much as it has read since its last pause: it takes as much
// memory, and from 2 GiB on it aborts.
void Bulk(const Target& target) {
  constexpr int kMiB = 3 << 10;
  std::thread repeated([&] {
    for (bool first = true; !stopping; first = false) {
      RawHttp2 connection(target.socket, 65535);
      for (int i = 0; i < kMiB && !stopping && connection.SendBulk(); ++i) {
      }
      while (!stopping && connection.unsent() > 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the pause
      }
      connection.SendBulk();
      connection.SendBulk();
      if (first) Ready();
    }
  });
  AwaitStop();
  _exit(0);  // a connection may wait for the daemon
}

// Opens connections whose answers it does not read, says that nothing more comes, and keeps them.
void StallAndClose(const Target& target) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  std::atomic<int> open{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      std::deque<RawHttp2> closed;
      while (!stopping) {
        closed.emplace_back(target.socket, 65535).StallAndClose();
        if (closed.size() > 1000) closed.pop_front();
        if (++open == 3000) Ready();
      }
    });
  }
  AwaitStop();
  _exit(0);  // a connection may wait for the daemon
}

// ---- Work

// Jobs of `world` ranks each that step without a pause.
void Steps(const Target& target, int jobs, std::uint32_t world, std::size_t buckets,
           std::uint64_t count) {
  std::atomic<int> running{0};
  std::vector<std::thread> threads;
  const int ranks = jobs * static_cast<int>(world);
  for (int i = 0; i < ranks; ++i) {
    threads.emplace_back([&, i] {
      fault::RawSession rank(target.socket);
      std::shared_ptr<fault::RawMemory> arena;
      std::uint32_t channel = 0;
      const auto number = static_cast<std::uint32_t>(i);
      const std::string job = "attack" + std::to_string(number / world);
      if (rank.Open(number % world, world, job).has_value()) {
        const auto assigned = rank.Register(fault::RawSession::LayoutRequest(buckets, count));
        if (assigned.has_value()) {
          channel = assigned->channel();
          arena = rank.Map(*assigned, target.side_socket);
        }
      }
      const bool joined = arena != nullptr && rank.Mapped(channel) &&
                          rank.Await(v1::SessionResponse::kLayoutReady).has_value();
      if (!joined) std::cerr << "attacker: could not join" << std::endl;
      if (++running == ranks) Ready();
      for (std::uint64_t step = 1; joined && !stopping; ++step) {
        if (!rank.EndStep(channel, step, /*ready_rest=*/true)) break;
        if (!rank.Await(v1::SessionResponse::kStepDone).has_value()) break;
      }
    });
  }
  AwaitStop();
  _exit(0);  // a session may wait for the daemon
}

// Opens a session and registers layouts, one after the other. Returns their channels, or nothing if
// that fails.
std::vector<std::uint32_t> Join(const Target& target, const v1::SessionRequest& open,
                                const std::vector<v1::SessionRequest>& layouts,
                                fault::RawSession* rank) {
  std::vector<std::uint32_t> channels;
  if (!rank->Send(open) || !rank->Await(v1::SessionResponse::kSessionOpened).has_value()) return {};
  for (const v1::SessionRequest& layout : layouts) {
    const auto assigned = rank->Register(layout);
    if (!assigned.has_value()) return {};
    const auto arena = rank->Map(*assigned, target.side_socket);
    if (arena == nullptr || !rank->Mapped(assigned->channel()) ||
        !rank->Await(v1::SessionResponse::kLayoutReady).has_value()) {
      return {};
    }
    channels.push_back(assigned->channel());
  }
  return channels;
}

// The most ranks and buckets of a layout: its void step has 131,072 done words.
constexpr std::uint32_t kVoidRanks = 32;
constexpr std::size_t kVoidBuckets = 4096;

// Makes such steps void while one of their buckets is reduced, without a pause.
void AbandonedSteps(const Target& target) {
  v1::SessionRequest layout = fault::RawSession::LayoutRequest(kVoidBuckets, 1);
  layout.mutable_register_layout()->mutable_explicit_buckets(0)->set_count(64 << 10);
  std::atomic<std::uint32_t> joined{0};
  std::atomic<std::uint64_t> marks{0};
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < kVoidRanks; ++i) {
    threads.emplace_back([&, i] {
      fault::RawSession rank(target.socket);
      const auto open = fault::RawSession::OpenRequest(i, kVoidRanks, "abandoned");
      const auto channels = Join(target, open, {layout}, &rank);
      if (channels.empty()) std::cerr << "attacker: could not join" << std::endl;
      if (++joined == kVoidRanks) Ready();
      for (std::uint64_t step = 1; !channels.empty() && !stopping; ++step) {
        // Rank 0 marks last, and abandons the step that the reduce threads then work at.
        while (i == 0 && marks < (kVoidRanks - 1) * step && !stopping) {
          std::this_thread::sleep_for(std::chrono::microseconds(50));  // the pace of the attack
        }
        if (!rank.Ready(channels[0], step, {0})) break;
        if (i > 0) ++marks;
        v1::SessionRequest abandon;
        abandon.mutable_abandon_step()->set_channel(channels[0]);
        abandon.mutable_abandon_step()->set_step(step);
        if (i == 0 && !rank.Send(abandon)) break;
        if (!rank.Await(v1::SessionResponse::kStepDone).has_value()) break;
      }
    });
  }
  AwaitStop();
  _exit(0);  // a session may wait for the daemon
}

// Begins such steps, on eight layouts at once, and lets them time out after a millisecond.
void ShortTimeouts(const Target& target) {
  std::vector<v1::SessionRequest> layouts;
  for (int i = 0; i < 8; ++i) {
    layouts.push_back(
        fault::RawSession::LayoutRequest(kVoidBuckets, 1, "layout" + std::to_string(i)));
  }
  std::atomic<std::uint32_t> joined{0};
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < kVoidRanks; ++i) {
    threads.emplace_back([&, i] {
      fault::RawSession rank(target.socket);
      auto open = fault::RawSession::OpenRequest(i, kVoidRanks, "timeouts");
      open.mutable_open_session()->mutable_options()->set_step_timeout_ms(1);
      const auto channels = Join(target, open, layouts, &rank);
      if (channels.empty()) std::cerr << "attacker: could not join" << std::endl;
      if (++joined == kVoidRanks) Ready();
      for (std::uint64_t step = 1; !channels.empty() && !stopping; ++step) {
        for (const std::uint32_t channel : channels) {
          if (i == 0 && !rank.Ready(channel, step, {0})) return;
        }
        for (std::size_t done = 0; done < channels.size(); ++done) {
          if (!rank.Await(v1::SessionResponse::kStepDone).has_value()) return;
        }
      }
    });
  }
  AwaitStop();
  _exit(0);  // a session may wait for the daemon
}

// Registers, maps and releases a layout of 64 MiB without a pause, in each of four sessions.
void Mapping(const Target& target) {
  std::vector<std::thread> threads;
  std::atomic<int> running{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      fault::RawSession rank(target.socket);
      const bool opened = rank.Open(0, 1, "mapping" + std::to_string(i)).has_value();
      if (++running == 4) Ready();
      while (opened && !stopping) {
        const auto assigned = rank.Register(fault::RawSession::LayoutRequest(1, 16 << 20));
        if (!assigned.has_value()) break;
        const auto arena = rank.Map(*assigned, target.side_socket);
        if (arena == nullptr || !rank.Mapped(assigned->channel()) ||
            !rank.Await(v1::SessionResponse::kLayoutReady).has_value()) {
          break;
        }
        v1::SessionRequest release;
        release.mutable_release_layout()->set_channel(assigned->channel());
        if (!rank.Send(release)) break;
      }
    });
  }
  AwaitStop();
  _exit(0);
}

const std::map<std::string, std::function<void(const Target&)>>& Attacks() {
  static const auto* const attacks = new std::map<std::string, std::function<void(const Target&)>>{
      {"reflection_streams", ReflectionStreams},
      {"zero_window", ZeroWindow},
      {"connections", Connections},
      {"side_clients", SideClients},
      {"status_flood", StatusFlood},
      {"nothings", Nothings},
      {"bulk", Bulk},
      {"stall_and_close", StallAndClose},
      {"reset_sessions",
       [](const Target& t) { RapidReset(t, "/gradsync.v1.GradientSync/Session"); }},
      {"reset_questions", [](const Target& t) { RapidReset(t, "/grpc.health.v1.Health/Check"); }},
      {"reset_and_close",
       [](const Target& t) { ResetAndClose(t, "/gradsync.v1.GradientSync/Session"); }},
      {"reset_unknown", [](const Target& t) { RapidReset(t, "/gradsync.v1.Nothing/Nothing"); }},
      // Many small buckets: each alone would be reduced on the thread that reads the message.
      {"inline_reductions", [](const Target& t) { Steps(t, 2, 1, 4096, 64 << 10); }},
      // Much to tell and little to reduce.
      {"tiny_buckets", [](const Target& t) { Steps(t, 2, 4, 4096, 1); }},
      {"many_sessions", [](const Target& t) { Steps(t, 32, 1, 256, 256); }},
      // Long slices of the reduce threads.
      {"large_buckets", [](const Target& t) { Steps(t, 2, 4, 4, 2 << 20); }},
      {"mapping", Mapping},
      {"abandoned_steps", AbandonedSteps},
      {"short_timeouts", ShortTimeouts},
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
  const auto attack = Attacks().find(flags["--attack"]);
  if (attack == Attacks().end()) {
    std::cerr << "attacker: --attack=NAME, one of:";
    for (const auto& entry : Attacks()) std::cerr << " " << entry.first;
    std::cerr << std::endl;
    return 2;
  }
  const std::string& uid = flags["--uid"];
  if (!uid.empty() && !BecomeUser(static_cast<uid_t>(std::stoul(uid)))) return 1;
  Target target;
  target.socket = flags["--socket"];
  target.side_socket = target.socket.substr(0, target.socket.rfind(".sock")) + "-fd.sock";
  attack->second(target);
  return 0;
}

}  // namespace
}  // namespace gradsync::attack

int main(int argc, char** argv) { return gradsync::attack::Main(argc, argv); }
