#include "daemon/rpc/unknown_calls.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "daemon/rpc/completion_dispatcher.h"
#include "daemon/rpc/long_headers.h"

namespace gradsync::daemon {

// Owns itself until its last operation has completed.
class UnknownCalls::Call final : public Completion {
 public:
  explicit Call(UnknownCalls* owner) : owner_(owner), counted_(owner->streams_->Add()) {}

  void Request() {
    owner_->service_.RequestCall(&context_, &stream_, owner_->queue_, owner_->queue_, this);
  }
  // The call has come, or it has been answered.
  void Run(bool ok) override {
    if (answered_ && owner_->hooks_.answered) owner_->hooks_.answered(context_.peer());
    if (!ok || std::exchange(answered_, true)) {
      delete this;
      return;
    }
    owner_->AcceptNext();
    const bool long_headers = HasLongHeaders(context_);
    if (owner_->hooks_.input) {
      const std::shared_ptr<ClientInput> input = owner_->hooks_.input(context_.peer());
      if (input != nullptr) {
        input->Count(0);
        if (long_headers) input->long_headers.store(true);
      }
    }
    if (long_headers) context_.TryCancel();
    stream_.Finish(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, ""), this);
  }

 private:
  UnknownCalls* const owner_;
  const std::shared_ptr<void> counted_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  bool answered_ = false;
};

void UnknownCalls::Register(grpc::ServerBuilder* builder) {
  builder->RegisterAsyncGenericService(&service_);
}

void UnknownCalls::Start(grpc::ServerCompletionQueue* queue) {
  queue_ = queue;
  AcceptNext();
}

void UnknownCalls::Stop() {
  const MutexLock lock(&mutex_);
  stopped_ = true;
}

void UnknownCalls::AcceptNext() {
  // Under the lock, so that gRPC gets no request after Stop(). gRPC does not call back from within.
  const MutexLock lock(&mutex_);
  if (!stopped_) (new Call(this))->Request();
}

}  // namespace gradsync::daemon
