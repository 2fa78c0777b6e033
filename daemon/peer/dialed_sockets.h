// The connections that gRPC makes to a coordinator, and the harm that comes on them.

#ifndef DAEMON_PEER_DIALED_SOCKETS_H_
#define DAEMON_PEER_DIALED_SOCKETS_H_

#include <grpcpp/support/channel_arguments.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/base/borrowed_socket.h"
#include "daemon/base/mutex.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/vain_bytes.h"

namespace gradsync::daemon {

// A trainer names its job's coordinator, so anything may answer there. gRPC limits the messages
// that come, but neither headers nor frames without a meaning. This class does.
//
// It knows every connection of one channel, from before gRPC connects it. Thread-safe. The channel
// shares it.
class DialedSockets {
 public:
  // `plain_text`: the connections have no TLS, so their headers can be read and are limited.
  explicit DialedSockets(bool plain_text) : plain_text_(plain_text) {}

  // Makes the channel with these arguments add its connections.
  static void AddTo(const std::shared_ptr<DialedSockets>& sockets,
                    grpc::ChannelArguments* arguments);

  // gRPC is about to connect the descriptor. False: it must not, because of Close().
  bool Add(int descriptor);
  // Ends all connections, and lets gRPC make no other one. gRPC itself ends them only when one of
  // its threads comes to it, and a flood on these connections may hold its threads.
  void Close();
  // A message with so many bytes has come.
  void CountMessage(std::size_t bytes) { input_.Count(bytes); }
  // The bytes that have come and that nobody has read.
  std::size_t UnreadBytes();
  // Returns how many bytes have been read in vain of all open connections.
  std::uint64_t Look();
  // Ends the connections of which too much was read in vain. `all`: the sum over all of the user's
  // coordinators. Returns HasHarmed().
  bool EndHarmful(const VainBytes::Most& most, std::uint64_t all);
  // True if a connection has ended because of its headers, or in EndHarmful().
  bool HasHarmed();

 private:
  struct Dialed {
    BorrowedSocket socket;
    VainBytes vain;
  };

  void NoteRefusedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const bool plain_text_;
  ClientInput input_;

  Mutex mutex_;
  std::vector<Dialed> dialed_ ABSL_GUARDED_BY(mutex_);  // mostly one
  bool harmed_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_DIALED_SOCKETS_H_
