// The gRPC stream that is a session.

#ifndef CLIENT_SRC_SESSION_STREAM_H_
#define CLIENT_SRC_SESSION_STREAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "client/src/unix_socket.h"

namespace gradsync::v1 {
class SessionRequest;
class SessionResponse;
}  // namespace gradsync::v1

namespace gradsync::client {

// The final status of a stream.
struct StreamEnd {
  int code = 0;  // absl::StatusCode
  std::string message;
  std::string details;  // serialized google.rpc.Status, or empty
};

// Takes what comes over the stream. Called on the stream's thread, which answers the lease:
// implementations never block on anything but short locks.
class StreamReceiver {
 public:
  virtual ~StreamReceiver() = default;
  virtual void OnMessage(const v1::SessionResponse& message) = 0;
  // Once, after the last message.
  virtual void OnStreamEnd(const StreamEnd& end) = 0;
};

// One bidirectional stream with a queue of outgoing messages and one thread that reads.
// Thread-safe.
//
// It polls a completion queue of its own. gRPC 1.51's callback API would spare the thread, but its
// pollers sleep 100 ms after every idle second (CallbackAlternativeCQ in completion_queue_cc.cc),
// and a step's verdict would wait for them.
//
// The thread owns all that it uses, so that a SessionStream may be destroyed at any time.
class SessionStream {
 public:
  // Takes over a connected socket, which it guards against fork(2). RESOURCE_EXHAUSTED without a
  // thread for it.
  static absl::StatusOr<std::unique_ptr<SessionStream>> Open(
      FileDescriptor socket, std::shared_ptr<StreamReceiver> receiver);
  // Closes.
  ~SessionStream();

  // Queues a message; never blocks on the daemon. Without effect once the stream has ended.
  void Send(v1::SessionRequest request);
  // The hot one: merged with a BucketReady of the same channel and step that still waits in the
  // queue.
  void SendBucketReady(std::uint32_t channel, std::uint64_t step, std::uint32_t bucket);

  // When one of these was called last; CLOCK_MONOTONIC, 0 before the first.
  std::int64_t sent_ns() const { return sent_ns_.load(std::memory_order_relaxed); }

  // Ends the stream, and returns when the receiver has been told, at the latest after 5 s.
  void Close();

 private:
  class Impl;
  SessionStream(std::shared_ptr<Impl> impl, std::thread thread);

  const std::shared_ptr<Impl> impl_;
  std::thread thread_;
  std::atomic<std::int64_t> sent_ns_{0};
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_SESSION_STREAM_H_
