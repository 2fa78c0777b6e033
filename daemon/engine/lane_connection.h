// One connection of a lane: moves messages between another node and the memory that was named for
// them.

#ifndef DAEMON_ENGINE_LANE_CONNECTION_H_
#define DAEMON_ENGINE_LANE_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/engine/peer_stream.h"
#include "daemon/engine/ring.h"

namespace gradsync::daemon {

// Transfers that are waited for together.
struct TransferGroup {
  int left = 0;  // transfers that are not done; LaneConnection does not change it
};

// One message, received or sent. Its memory is used until it is done.
struct Transfer {
  TransferGroup* group = nullptr;
  std::byte* data = nullptr;
  std::size_t bytes = 0;  // above 0
};

// Messages arrive in the order in which they were sent. Each begins with its number and its length.
// The receiver knows both: another message than the expected one breaks the connection.
//
// Not thread-safe. Never blocks.
class LaneConnection {
 public:
  LaneConnection() = default;
  explicit LaneConnection(PeerStream stream) : stream_(std::move(stream)) {}

  void Receive(const Transfer& transfer) { in_.transfers.Push(transfer); }
  // Only reads the message's memory.
  void Send(const Transfer& transfer) { out_.transfers.Push(transfer); }

  // Moves as much as the socket takes and has. Adds the group of each transfer that is done to
  // `done`: received, or taken by the kernel to be sent. UNAVAILABLE: the connection is broken.
  // INTERNAL: the other side has sent another message than the expected one; its data is not taken.
  // After an error, Move() may not be called again.
  absl::Status Move(std::vector<TransferGroup*>* done);
  // The events of poll() that make progress possible; 0 without a transfer.
  int events() const;

  PeerStream& stream() { return stream_; }

 private:
  // What comes before each message.
  struct Header {
    std::uint64_t number = 0;  // of the message on this connection, from 1
    std::uint64_t bytes = 0;
  };
  struct Direction {
    Ring<Transfer> transfers;
    Header header;                // of the first transfer
    std::size_t header_done = 0;  // bytes
    std::size_t data_done = 0;
    std::uint64_t number = 0;  // of the last message
  };

  absl::Status Read(std::vector<TransferGroup*>* done);
  absl::Status Write(std::vector<TransferGroup*>* done);
  static void Done(Direction* direction, std::vector<TransferGroup*>* done);

  PeerStream stream_;
  Direction in_;
  Direction out_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_LANE_CONNECTION_H_
