// Coordinators that an attack plays, as if they were on other machines.

#ifndef TESTS_ATTACK_REMOTE_COORDINATORS_H_
#define TESTS_ATTACK_REMOTE_COORDINATORS_H_

#include <functional>
#include <string>
#include <vector>

#include "tests/fault/fake_coordinator.h"
#include "tests/kit/pipe.h"

namespace gradsync::attack {

// Coordinators in a process of their own, which stays root's: without TLS the daemon takes no
// orders from another user's process on its own machine, but from any process on others. The
// destructor ends them. Not thread-safe.
//
// Make it before the attack becomes another user, and before it has threads.
class RemoteCoordinators {
 public:
  using Script = std::function<void(fault::FakeCoordinator::Stream*)>;

  // Each coordinator says Welcome on each stream, then runs `script`.
  RemoteCoordinators(int count, const Script& script);

  const std::string& address(int number) const { return addresses_[number]; }
  // Waits until the daemon has begun another stream to some coordinator. False: they have ended.
  bool AwaitStream();

 private:
  // The process ends when `life_` closes. It writes a byte to `streams_` for each stream.
  Pipe life_, streams_;
  std::vector<std::string> addresses_;
};

}  // namespace gradsync::attack

#endif  // TESTS_ATTACK_REMOTE_COORDINATORS_H_
