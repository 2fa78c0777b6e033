// Answers the calls of methods that a server does not have: UNIMPLEMENTED.
//
// gRPC 1.51 could answer them itself, but has a race: if two threads serve the queue, it can hand
// out a null tag for a call that came before gRPC asked for one. The cause is in server_cc.cc: the
// constructor of GenericAsyncRequest asks before the object is an UnimplementedAsyncRequest.

#ifndef DAEMON_RPC_UNKNOWN_CALLS_H_
#define DAEMON_RPC_UNKNOWN_CALLS_H_

#include <grpcpp/generic/async_generic_service.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "daemon/base/mutex.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/stream_count.h"

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace gradsync::daemon {

// Legal calls: Register Start Stop. Outlives the dispatcher of its queue.
class UnknownCalls {
 public:
  // The queue's threads call the hooks, with gRPC's name of the caller. Each hook may be empty.
  struct Hooks {
    // Where the calls of the caller's connection are counted; null: nowhere.
    std::function<std::shared_ptr<ClientInput>(const std::string& caller)> input;
    std::function<void(const std::string& caller)> answered;
  };
  // `streams` counts the calls, including the one that this object waits for, and outlives this
  // object.
  explicit UnknownCalls(StreamCount* streams, Hooks hooks = {})
      : streams_(streams), hooks_(std::move(hooks)) {}

  // Called before the server is built.
  void Register(grpc::ServerBuilder* builder);
  // Called after it is built. Starts to accept calls.
  void Start(grpc::ServerCompletionQueue* queue);
  // Accepts no more calls, so that the queue can be shut down. Idempotent.
  void Stop();

 private:
  class Call;
  void AcceptNext();

  StreamCount* const streams_;
  const Hooks hooks_;
  grpc::AsyncGenericService service_;
  grpc::ServerCompletionQueue* queue_ = nullptr;  // constant once started

  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_UNKNOWN_CALLS_H_
