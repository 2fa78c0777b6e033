// A worker's reply as the daemon reads it from their socket pair, and a call as the worker reads
// it.

#include <sys/socket.h>

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_error.h"
#include "tests/fuzz/check.h"

using gradsync::daemon::MessageSocket;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto* const ends = [] {
    auto pair = MessageSocket::Pair();
    FUZZ_CHECK(pair.ok());
    return new std::pair<MessageSocket, MessageSocket>(*std::move(pair));
  }();
  if (size == 0 || size > MessageSocket::kMaxMessageBytes) return 0;
  FUZZ_CHECK(send(ends->first.fd(), data, size, 0) == static_cast<ssize_t>(size));
  const auto received = ends->second.Receive();
  FUZZ_CHECK(received.ok() && !received->end && received->bytes.size() == size);
  gradsync::worker::Reply reply;
  if (reply.ParseFromString(received->bytes) && reply.has_error()) {
    FUZZ_CHECK(!gradsync::daemon::DecodeError(reply.error()).ok());
  }
  gradsync::worker::Call call;
  call.ParseFromString(received->bytes);
  return 0;
}
