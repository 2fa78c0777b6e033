// Accepts the calls of a service one after the other, and lists the streams that are open.

#ifndef DAEMON_RPC_STREAM_ACCEPTOR_H_
#define DAEMON_RPC_STREAM_ACCEPTOR_H_

#include <grpcpp/completion_queue.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// Thread-safe. `Stream` is a ServerStream; the streams own themselves. The acceptor outlives the
// dispatcher of its queue.
template <class Stream>
class StreamAcceptor {
 public:
  struct Hooks {
    // Makes the stream of the next call.
    std::function<std::shared_ptr<Stream>()> make;
    typename Stream::Request request;
    // A call has come. `open` are the open streams, including this one. Called before its first
    // message is read. The hook may be empty.
    std::function<void(Stream* stream, const std::vector<std::shared_ptr<Stream>>& open)> accepted;
  };

  // Starts to accept calls. Called once, after the server has been built.
  void Start(Hooks hooks, grpc::ServerCompletionQueue* queue) {
    hooks_ = std::move(hooks);
    queue_ = queue;
    AcceptNext();
  }

  // Accepts no more calls, so that the queue can be shut down. Idempotent.
  void Stop() {
    MutexLock lock(&mutex_);
    stopped_ = true;
  }

  // Returns the open streams.
  std::vector<std::shared_ptr<Stream>> Open() {
    MutexLock lock(&mutex_);
    return OpenLocked();
  }

 private:
  std::vector<std::shared_ptr<Stream>> OpenLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<std::weak_ptr<Stream>> kept;
    std::vector<std::shared_ptr<Stream>> open;
    for (const auto& stream : streams_) {
      if (auto live = stream.lock()) {
        kept.push_back(stream);
        open.push_back(std::move(live));
      }
    }
    streams_ = std::move(kept);
    return open;
  }

  void AcceptNext() {
    const std::shared_ptr<Stream> next = hooks_.make();
    MutexLock lock(&mutex_);
    if (stopped_) return;
    // Under the lock, so that gRPC gets no request after Stop(). gRPC does not call back from
    // within.
    next->Accept(hooks_.request, queue_, [this, stream = next.get()](bool ok) {
      if (ok) Accepted(stream);
    });
  }

  void Accepted(Stream* stream) {
    std::vector<std::shared_ptr<Stream>>
        open;  // destroyed without the lock: may hold last references
    {
      MutexLock lock(&mutex_);
      streams_.push_back(std::static_pointer_cast<Stream>(stream->shared_from_this()));
      open = OpenLocked();
    }
    if (hooks_.accepted) hooks_.accepted(stream, open);
    AcceptNext();
  }

  Hooks hooks_;  // constant once started
  grpc::ServerCompletionQueue* queue_ = nullptr;

  Mutex mutex_;
  std::vector<std::weak_ptr<Stream>> streams_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_STREAM_ACCEPTOR_H_
