// What the attacks of attacker.cc share.

#ifndef TESTS_ATTACK_ATTACKER_H_
#define TESTS_ATTACK_ATTACKER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "tests/attack/remote_coordinators.h"

namespace gradsync::attack {

// The job at which some attacks aim.
struct Victim {
  std::uint32_t user = 0;
  std::string job;
  std::uint32_t ranks = 0;
};

// What an attack uses. Constant.
struct Target {
  std::string socket;
  std::string side_socket;
  std::string peer;          // "host:port" where other nodes reach the daemon
  std::string other_socket;  // of another node's daemon
  std::uint32_t user = 0;    // in whose name it says Hello at `peer`
  Victim victim;
  std::shared_ptr<RemoteCoordinators> coordinators;  // null unless the attack has `coordinate`
};

// `run` goes on until the process ends.
struct Attack {
  std::function<void(const Target&)> run;
  bool on_peer_port = false;
  bool across = false;     // its jobs are on two nodes
  bool on_victim = false;  // it aims at the victim's job, and becomes some user itself
  // Returns what each of kCoordinators coordinators does on each stream, after Welcome.
  std::function<RemoteCoordinators::Script()> coordinate = nullptr;
};
inline constexpr int kCoordinators = 8;
using Attacks = std::map<std::string, Attack>;  // by name

Attacks ConnectionAttacks();  // connection_attacks.cc
Attacks SessionAttacks();     // session_attacks.cc

// Runs `attack` on each of `threads` threads. Prints READY when each has called `begun` at least
// once.
using Begun = std::function<void()>;
[[noreturn]] void OnThreads(int threads,
                            const std::function<void(int thread, const Begun& begun)>& attack);
// Runs `round` over and over on each of `threads` threads. Prints READY when each has run it once.
[[noreturn]] void Repeat(int threads, const std::function<void(int thread)>& round);

}  // namespace gradsync::attack

#endif  // TESTS_ATTACK_ATTACKER_H_
