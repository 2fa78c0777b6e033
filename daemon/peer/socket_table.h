// The users of this network namespace's TCP sockets, from the kernel's tables: /proc/net/tcp and
// /proc/net/tcp6 (proc(5)). For kernels that do not answer about one connection (socket_owner.h).

#ifndef DAEMON_PEER_SOCKET_TABLE_H_
#define DAEMON_PEER_SOCKET_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/socket_owner.h"

namespace gradsync::daemon {

// A read takes the longer, the more sockets the machine has: up to a few tenths of a second. So it
// keeps what it has read last, and all callers that came before that read share it. Even if
// connections come without end, a caller waits for two reads at most: the one under way, and the
// next one.
//
// Thread-safe. One thread reads at a time; others wait for it.
class SocketTable {
 public:
  // It reads at most this much of each file.
  static constexpr std::size_t kMostBytes = std::size_t{16} << 20;

  // `clock` outlives it.
  explicit SocketTable(const Clock* clock,
                       std::vector<std::string> files = {"/proc/net/tcp", "/proc/net/tcp6"})
      : clock_(clock), files_(std::move(files)) {}

  // The users of the connected sockets that have the end `own`, and are connected to
  // `remote_port`. Closed sockets do not count: the kernel no longer knows their user. There can be
  // several users if sockets share a port (SO_REUSEADDR). Reads the tables anew if the
  // last read began before `since_ns`. So it finds open connections from before `since_ns`, but may
  // miss newer ones.
  std::vector<std::uint32_t> UsersOf(const TcpEnd& own, std::uint16_t remote_port,
                                     std::uint64_t since_ns);

 private:
  struct Socket {
    TcpEnd own;
    std::uint16_t remote_port = 0;
    std::uint32_t user = 0;
    bool operator<(const Socket& other) const { return own < other.own; }
  };

  // The connected sockets, sorted.
  std::vector<Socket> Read() const;
  static void AddLine(absl::string_view line, std::vector<Socket>* sockets);

  const Clock* const clock_;
  const std::vector<std::string> files_;

  Mutex mutex_;
  std::vector<Socket> sockets_ ABSL_GUARDED_BY(mutex_);  // of the last read
  std::uint64_t read_ns_ ABSL_GUARDED_BY(mutex_) = 0;    // when the last read began; 0: none has
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_SOCKET_TABLE_H_
