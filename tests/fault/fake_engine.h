// The engine of a node that a test plays: it meets one other node's engine, and then sends it what
// the test wants, in clear text.

#ifndef TESTS_FAULT_FAKE_ENGINE_H_
#define TESTS_FAULT_FAKE_ENGINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kit/child_process.h"

namespace gradsync::fault {

// Node 0 of an engine accepts the other node's connections, node 1 makes them. `other` is what the
// other node has stored in the rendezvous. Not thread-safe.
class FakeEngine {
 public:
  // `node`: 0 or 1. `lanes`: of the engine.
  FakeEngine(std::uint32_t node, std::uint32_t lanes);

  // What this node stores: its address, its secret, and the settings of the other node.
  std::string Stored(const std::string& other) const;
  // Meets the other node, as soon as that node knows Stored(). False: it could not.
  bool Meet(const std::string& other);
  // Sends as much as the kernel takes at once. Connection 0 is that of the watch; connection k that
  // of lane k - 1.
  void Send(std::uint32_t connection, const std::string& bytes) const;

 private:
  bool Accept();
  bool Connect(const std::string& other);

  const std::uint32_t node_;
  const std::string token_;
  Descriptor listener_;
  std::uint16_t port_ = 0;
  std::vector<Descriptor> connections_;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_FAKE_ENGINE_H_
