// An attacker, another user's innocent job, and a user who asks, as processes beside a daemon.

#ifndef TESTS_ATTACK_NEIGHBOURS_H_
#define TESTS_ATTACK_NEIGHBOURS_H_

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::attack {

inline constexpr uid_t kAttacker = 12345;
inline constexpr uid_t kInnocent = 23456;

// Lets every user reach the daemon's sockets.
void LetEveryoneIn(const TestDaemon& daemon);

// Runs an attack of attacker.cc until the destructor. The constructor returns when the attack is at
// its full strength. An attack on one job aims at the innocent user's job `another`, of two ranks.
class Attacker {
 public:
  // `peer`: where other nodes reach the daemon, for an attack that goes there. `other_socket`: of
  // another node's daemon, for an attack across nodes. `command_prefix`: the words before its
  // command.
  Attacker(const TestDaemon& daemon, const std::string& attack, uid_t user = kAttacker,
           const std::string& peer = "", const std::string& other_socket = "",
           const std::vector<std::string>& command_prefix = {});
  bool ready() const { return ready_; }

 private:
  Descriptor lifeline_;
  std::unique_ptr<ChildProcess> process_;
  bool ready_ = false;
};

// For comparison: with ATTACK_ANOTHER_DAEMON in the environment, fairness_test and
// across_nodes_test attack a daemon that the innocent job does not use. Then the job's times show
// what the attack's threads cost on these CPUs, whatever the job's daemon does. Null without that
// variable.
std::unique_ptr<TestDaemon> AnotherDaemonToAttack(const std::vector<std::string>& flags);

// As long as a probe of the kubelet may wait for an answer.
inline constexpr std::uint64_t kProbeNs = 5'000'000'000 * kScale;

// Runs asker.cc as this user: the test's own, or any user if the test runs as root. Returns what
// the program says: "ANSWERED", unless a question failed, or a connection and its three questions
// took longer than `patience_ns`.
std::string Ask(const TestDaemon& daemon, uid_t user, std::uint64_t patience_ns = kProbeNs);

// What innocent.cc measures.
struct StepTimes {
  std::uint64_t p50_us = 0;
  std::uint64_t p99_us = 0;
  std::uint64_t max_us = 0;
  std::uint64_t wrong = 0;
  std::string error;  // empty: all steps were complete
};
std::ostream& operator<<(std::ostream& out, const StepTimes& times);

// A job of innocent.cc. `options` are more of its flags.
class InnocentJob {
 public:
  explicit InnocentJob(const TestDaemon& daemon, const std::vector<std::string>& options = {},
                       uid_t user = kInnocent);
  bool ready() const { return ready_; }
  StepTimes Run(int steps);

 private:
  Descriptor commands_;
  std::unique_ptr<LineReader> answers_;
  std::unique_ptr<ChildProcess> process_;
  bool ready_ = false;
};

// Another user's job on a daemon, while the test does something else to that daemon. Without root
// it is another job of the test's own user. Declare it after the daemon.
class Neighbour {
 public:
  // Lets every user reach the daemon, and runs the job's first steps.
  explicit Neighbour(const TestDaemon& daemon);
  // The job goes on, and another one of its user can begin.
  void ExpectUnharmed();

 private:
  const TestDaemon& daemon_;
  InnocentJob job_;
};

}  // namespace gradsync::attack

#endif  // TESTS_ATTACK_NEIGHBOURS_H_
