// Messages and file descriptors between the daemon and a worker.

#ifndef DAEMON_WORKER_MESSAGE_SOCKET_H_
#define DAEMON_WORKER_MESSAGE_SOCKET_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "daemon/base/unique_fd.h"
#include "google/protobuf/message_lite.h"

namespace gradsync::daemon {

// One end of a SOCK_SEQPACKET pair. Owns its descriptor. Thread-safe, because the kernel keeps
// messages whole, but only one thread may receive.
class MessageSocket {
 public:
  // Enough for the largest launch: 1024 ranks with 10 bytes each.
  static constexpr std::size_t kMaxMessageBytes = 64 << 10;
  // Enough for an engine's memory, its keys and its lanes.
  static constexpr std::size_t kMaxDescriptors = 18;

  explicit MessageSocket(UniqueFd fd) : fd_(std::move(fd)) {}
  static absl::StatusOr<std::pair<MessageSocket, MessageSocket>> Pair();

  // This end expects no descriptors. Since Linux 6.16 the other end cannot send any.
  void ExpectNoDescriptors() const;

  int fd() const { return fd_.get(); }
  UniqueFd Release() { return std::move(fd_); }

  enum class Wait : unsigned char { kYes, kNo };
  // The caller keeps `descriptors`. UNAVAILABLE if the other end is closed. RESOURCE_EXHAUSTED,
  // only with Wait::kNo, if its queue is full. INVALID_ARGUMENT if the message is too large.
  absl::Status Send(const google::protobuf::MessageLite& message, absl::Span<const int> descriptors,
                    Wait wait) const;

  struct Received {
    bool end = false;  // the other end is closed; there is no message
    std::string bytes;
    std::vector<UniqueFd> descriptors;
  };
  // Waits for a message.
  absl::StatusOr<Received> Receive() const;

 private:
  UniqueFd fd_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_MESSAGE_SOCKET_H_
