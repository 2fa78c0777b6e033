// A user who attacks a daemon, until standard input ends.
//
//   attacker --attack=NAME --socket=PATH [--peer=HOST:PORT] [--other_socket=PATH] [--uid=N]
//            [--victim_user=N --victim_job=NAME --victim_ranks=N]
//   attacker --list     prints the names of all attacks
//
// It prints READY when the attack is at its full strength, and goes on. It never fails for what the
// daemon refuses: that is the daemon's defence. tests/attack and tools/soak run it beside innocent
// jobs. The attacks are in connection_attacks.cc and session_attacks.cc.
//
// Attacks on the peer port need --peer. They come from an address of their own, as another
// machine's would, and keep this process's user: without TLS the daemon refuses other users of its
// own machine; peer_strangers is such a user. Attacks across nodes need --peer and --other_socket:
// they are trainers on both nodes, of a job that the first one's daemon coordinates. Attacks on one
// job need the flags of the victim: they try to take a rank of that job.

#include "tests/attack/attacker.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <iostream>
#include <memory>
#include <thread>
#include <vector>

#include "tests/fault/raw_session.h"
#include "tests/kit/become_user.h"
#include "tests/kit/flags.h"

namespace gradsync::attack {

void OnThreads(int threads, const std::function<void(int thread, const Begun& begun)>& attack) {
  std::atomic<int> begun{0};
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      bool told = false;
      attack(thread, [&] {
        if (!told && ++begun == threads) std::cout << "READY" << std::endl;
        told = true;
      });
    });
  }
  for (;;) pause();
}

void Repeat(int threads, const std::function<void(int thread)>& round) {
  OnThreads(threads, [&](int thread, const Begun& begun) {
    for (;;) {
      round(thread);
      begun();
    }
  });
}

namespace {

int Main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  auto flags = FlagsOf(argc, argv);
  Attacks attacks = ConnectionAttacks();
  attacks.merge(SessionAttacks());
  if (flags.count("--list") > 0) {
    for (const auto& entry : attacks) std::cout << entry.first << "\n";
    return 0;
  }
  const auto found = attacks.find(flags["--attack"]);
  if (found == attacks.end()) {
    std::cerr << "attacker: --attack=NAME; --list prints the names" << std::endl;
    return 2;
  }
  const Attack& attack = found->second;
  Target target;
  target.socket = flags["--socket"];
  target.side_socket = fault::SideSocketOf(target.socket);
  target.peer = flags["--peer"];
  target.other_socket = flags["--other_socket"];
  if (attack.across && target.other_socket.empty()) {
    std::cerr << "attacker: --other_socket=PATH" << std::endl;
    return 2;
  }
  if ((attack.on_peer_port || attack.across) && target.peer.find(':') == std::string::npos) {
    std::cerr << "attacker: --peer=HOST:PORT" << std::endl;
    return 2;
  }
  if (attack.coordinate != nullptr) {
    target.coordinators = std::make_shared<RemoteCoordinators>(kCoordinators, attack.coordinate());
  }
  if (!flags["--uid"].empty()) {
    target.user = static_cast<std::uint32_t>(std::stoul(flags["--uid"]));
    if (!attack.on_peer_port && !attack.on_victim && !BecomeUser(target.user)) return 1;
  }
  if (!flags["--victim_job"].empty()) {
    target.victim = {static_cast<std::uint32_t>(std::stoul(flags["--victim_user"])),
                     flags["--victim_job"],
                     static_cast<std::uint32_t>(std::stoul(flags["--victim_ranks"]))};
  }
  if (attack.on_victim && target.victim.job.empty()) {
    std::cerr << "attacker: --victim_user=N --victim_job=NAME --victim_ranks=N" << std::endl;
    return 2;
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
