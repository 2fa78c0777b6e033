// What the daemon's threads have received from a connection.

#ifndef DAEMON_RPC_CLIENT_INPUT_H_
#define DAEMON_RPC_CLIENT_INPUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gradsync::daemon {

// The calls of a connection write it, and the owner of the connection reads it.
struct ClientInput {
  // A call, or a message with so many bytes, has come.
  void Count(std::size_t message_bytes) {
    received.fetch_add(1);
    bytes.fetch_add(message_bytes);
  }

  std::atomic<std::uint64_t> received{0};  // calls, and a peer's messages
  std::atomic<std::uint64_t> bytes{0};     // of the messages
  std::atomic<bool> long_headers{false};   // a call had too long headers: see long_headers.h
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CLIENT_INPUT_H_
