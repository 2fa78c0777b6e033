// The server's side of a stream, from the call that opens it to its last operation.

#ifndef DAEMON_RPC_SERVER_STREAM_H_
#define DAEMON_RPC_SERVER_STREAM_H_

#include <grpcpp/completion_queue.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/async_stream.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/long_headers.h"
#include "daemon/rpc/message_stream.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {

// Thread-safe. Owns itself from Accept() until its last operation has completed.
template <class In, class Out, class Item = Out>
class ServerStream : public MessageStream<In, Out, Item> {
 public:
  using Call = grpc::ServerAsyncReaderWriter<Out, In>;
  // The service's RequestX(context, call, queue, queue, tag).
  using Request =
      std::function<void(grpc::ServerContext*, Call*, grpc::ServerCompletionQueue*, void* tag)>;

  using MessageStream<In, Out, Item>::MessageStream;

  // Waits for the next call. Calls `accepted` once: with true before it reads the first message, or
  // with false if the server stops first.
  void Accept(const Request& request, grpc::ServerCompletionQueue* queue,
              std::function<void(bool ok)> accepted) {
    accepting_ = this->shared_from_this();
    accepted_ = std::move(accepted);
    if (AsksForDone()) {
      done_ = accepting_;
      context_.AsyncNotifyWhenDone(&on_done_);
    }
    request(&context_, &call_, queue, &on_accept_);
  }

  void Cancel() final { context_.TryCancel(); }

 protected:
  // The call has come. Its first message has not been read yet. QueueEnd() refuses the call.
  virtual void OnAccepted() = 0;
  // Where calls and messages of the caller's connection are counted; null: nowhere.
  virtual std::shared_ptr<ClientInput> CallersInput() const { return nullptr; }
  // A message with so many bytes has come.
  void Heard(std::size_t bytes) {
    if (input_ != nullptr) input_->Count(bytes);
  }
  // True if the stream is to end once its client has closed it, even if no read or write is under
  // way that would show it.
  virtual bool AsksForDone() const { return false; }

  // Returns the caller's address, as gRPC names it.
  std::string caller() const { return context_.peer(); }

 private:
  void OnAccept(bool ok) {
    const auto keep = std::move(accepting_);
    if (ok) {
      const bool long_headers = HasLongHeaders(context_);
      input_ = CallersInput();
      Heard(0);
      if (long_headers) {
        if (input_ != nullptr) input_->long_headers.store(true);
        this->QueueEnd(absl::ResourceExhaustedError("the call's headers are too long"));
        Cancel();  // a client that reads nothing cannot keep the call open
      }
      OnAccepted();
    } else {
      done_.reset();  // gRPC tells of the end of a call only if the call has come
    }
    const auto accepted = std::move(accepted_);
    accepted(ok);
    if (ok) this->Began();
  }

  void OnDone(bool) {
    const auto keep = std::move(done_);
    if (!context_.IsCancelled()) return;
    this->Close(absl::CancelledError("the client has closed the stream"));
  }

  void StartRead(In* message, void* tag) final { call_.Read(message, tag); }
  void StartWrite(const Out& message, void* tag) final { call_.Write(message, tag); }
  void StartFinish(const absl::Status& status, void* tag) final {
    call_.Finish(ToGrpc(status), tag);
  }
  bool CanFinish() const final { return true; }

  grpc::ServerContext context_;
  Call call_{&context_};
  MethodCompletion<ServerStream, &ServerStream::OnAccept> on_accept_{this};
  MethodCompletion<ServerStream, &ServerStream::OnDone> on_done_{this};
  std::function<void(bool ok)> accepted_;
  std::shared_ptr<ClientInput> input_;
  // Each keeps the stream alive until its completion has run.
  std::shared_ptr<MessageStream<In, Out, Item>> accepting_;
  std::shared_ptr<MessageStream<In, Out, Item>> done_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_SERVER_STREAM_H_
