// The connections that gRPC makes to a coordinator, and the harm that comes on them.

#ifndef DAEMON_PEER_DIALED_SOCKETS_H_
#define DAEMON_PEER_DIALED_SOCKETS_H_

#include <grpcpp/support/channel_arguments.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/borrowed_socket.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/peer/user_rate.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/vain_bytes.h"

namespace gradsync::daemon {

// A trainer names its job's coordinator, so anything may answer there. gRPC limits the messages
// that come, but neither headers nor frames without a meaning. This class does.
//
// It knows every connection of one channel, from before gRPC connects it. Thread-safe. The channel
// shares it.
//
// On a connection without TLS this class checks the frames as gRPC reads them (header_frames.h). It
// learns of bytes read in vain only at the next Look(). Before that, a coordinator could send some,
// end the connection itself, and accept the next one. So a UserRate limits how often a user
// connects.
class DialedSockets {
 public:
  // `plain_text`: the connections have no TLS, so their headers can be read and are limited.
  // `user`: whose coordinator it is. `rate`: null: gRPC may connect as often as it likes.
  explicit DialedSockets(bool plain_text, const Tenant& user = {},
                         std::shared_ptr<UserRate> rate = nullptr)
      : plain_text_(plain_text), user_(user), rate_(std::move(rate)) {}

  // Makes the channel with these arguments add its connections.
  static void AddTo(const std::shared_ptr<DialedSockets>& sockets,
                    grpc::ChannelArguments* arguments);

  // gRPC is about to connect the descriptor. False: it must not, because of Close(), or because the
  // user has connected too often. Then gRPC waits, and tries again.
  bool Add(int descriptor);
  // Ends all connections, and prevents new ones. gRPC itself ends them only when one of its threads
  // comes to it, and a flood on these connections may hold its threads. A descriptor that is added
  // but not connected yet does not end; gRPC cannot write to it, and closes it.
  void Close();
  // A message with so many bytes has come.
  void CountMessage(std::size_t bytes) { input_.Count(bytes); }
  // The bytes that have come and that nobody has read.
  std::size_t UnreadBytes();
  // Returns how many bytes were read in vain from the open connections.
  std::uint64_t Look();
  // Ends the connections of which too much was read in vain. `all`: the sum over all of the user's
  // coordinators. Returns HasHarmed().
  bool EndHarmful(const VainBytes::Most& most, std::uint64_t all);
  // Notes that a connection has brought harm. The caller ends the connection.
  void NoteHarm();
  // True after NoteHarm(), or if a connection has ended because of a limit of HeaderFrames, or in
  // EndHarmful().
  bool HasHarmed();

 private:
  struct Dialed {
    BorrowedSocket socket;
    VainBytes vain;
  };

  void NoteRefusedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const bool plain_text_;
  const Tenant user_;
  const std::shared_ptr<UserRate> rate_;
  ClientInput input_;

  Mutex mutex_;
  std::vector<Dialed> dialed_ ABSL_GUARDED_BY(mutex_);  // mostly one
  bool harmed_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_DIALED_SOCKETS_H_
