// What the daemon's threads have received from a connection.

#ifndef DAEMON_RPC_CLIENT_INPUT_H_
#define DAEMON_RPC_CLIENT_INPUT_H_

#include <atomic>
#include <cstdint>

namespace gradsync::daemon {

// The streams of a connection write it, and the owner of the connection reads it.
struct ClientInput {
  std::atomic<std::uint64_t> received{0};  // calls and messages
  std::atomic<bool> long_headers{false};   // a call had too long ones: see long_headers.h
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CLIENT_INPUT_H_
