// The gRPC stream of a session.

#ifndef CLIENT_SRC_SESSION_STREAM_H_
#define CLIENT_SRC_SESSION_STREAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "client/include/gradsync/client.h"
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

// Receives the stream's messages, on the stream's thread. That thread also answers lease questions,
// so an implementation blocks only on locks that are held for a short time.
class StreamReceiver {
 public:
  virtual ~StreamReceiver() = default;
  virtual void OnMessage(const v1::SessionResponse& message) = 0;
  // Once, after the last message.
  virtual void OnStreamEnd(const StreamEnd& end) = 0;
};

// One bidirectional stream with a queue of outgoing messages and one thread that reads.
// Thread-safe. The thread owns everything that it uses, so a SessionStream may be destroyed at any
// time.
//
// The thread polls a completion queue. gRPC 1.51's callback API would need no such thread. But its
// pollers sleep for 100 ms after every idle second (CallbackAlternativeCQ in
// completion_queue_cc.cc), and a step's verdict would wait for that.
class SessionStream {
 public:
  // Owns `socket`, which is connected, and guards it against fork(2).
  //   RESOURCE_EXHAUSTED  OPEN_FILES: too few descriptors are left for gRPC. MEMORY: no thread can
  //                       be started, or as GuardedSocket::Guard.
  static absl::StatusOr<std::unique_ptr<SessionStream>> Open(
      FileDescriptor socket, std::shared_ptr<StreamReceiver> receiver);
  // Closes the stream.
  ~SessionStream();

  // Queues a message; never waits for the daemon. Does nothing once the stream has ended.
  void Send(v1::SessionRequest request);
  // The same for several messages. No other message comes between them.
  void Send(std::vector<v1::SessionRequest> requests);
  // The same for a BucketReady, on the hot path. If the last message in the queue is a BucketReady
  // of the same channel and step that is not full, adds the bucket to it. `position`: for the
  // step's first message; null: none.
  void SendBucketReady(std::uint32_t channel, std::uint64_t step, std::uint32_t bucket,
                       const Position* position);

  // When one of the Send methods was last called, in nanoseconds of CLOCK_MONOTONIC; 0 before the
  // first call.
  std::int64_t sent_ns() const { return sent_ns_.load(std::memory_order_relaxed); }

  // Ends the stream. Returns after OnStreamEnd, or after 5 s.
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
