// Hears a service say that it is ready, by sd_notify(3)'s protocol: READY=1 in a datagram.

#ifndef CLIENT_EXAMPLES_READY_SOCKET_H_
#define CLIENT_EXAMPLES_READY_SOCKET_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace gradsync::examples {

// The service is started with NOTIFY_SOCKET = `path`.
class ReadySocket {
 public:
  static absl::StatusOr<std::unique_ptr<ReadySocket>> Create(const std::string& path);
  ~ReadySocket();
  ReadySocket(const ReadySocket&) = delete;
  ReadySocket& operator=(const ReadySocket&) = delete;

  int descriptor() const { return descriptor_; }
  // Reads what has come, without waiting; true if READY=1 was in it.
  bool ReadReady();

 private:
  explicit ReadySocket(int descriptor) : descriptor_(descriptor) {}

  const int descriptor_;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_READY_SOCKET_H_
