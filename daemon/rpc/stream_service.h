// A service of gRPC whose methods are all served as streams, whatever their form.

#ifndef DAEMON_RPC_STREAM_SERVICE_H_
#define DAEMON_RPC_STREAM_SERVICE_H_

#include <grpcpp/completion_queue.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_context.h>

#include <initializer_list>

namespace gradsync::daemon {

// Registered before the server is built, and outlives it.
class StreamService final : public grpc::Service {
 public:
  // `methods`: paths such as "/grpc.health.v1.Health/Check", string literals.
  StreamService(std::initializer_list<const char*> methods) {
    int index = 0;
    for (const char* method : methods) {
      // The base class owns it. Without a handler it is asynchronous.
      AddMethod(new grpc::internal::RpcServiceMethod(
          method, grpc::internal::RpcMethod::BIDI_STREAMING, nullptr));
      MarkMethodAsync(index++);
    }
  }

  // What ServerStream::Accept() needs to wait for a call of the method.
  template <class Stream>
  typename Stream::Request RequestOf(int method) {
    return [this, method](grpc::ServerContext* context, typename Stream::Call* call,
                          grpc::ServerCompletionQueue* queue, void* tag) {
      RequestAsyncBidiStreaming(method, context, call, queue, queue, tag);
    };
  }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_STREAM_SERVICE_H_
