#include "daemon/rpc/completion_dispatcher.h"

#include <utility>

#include "daemon/base/thread.h"

namespace gradsync::daemon {

CompletionDispatcher::CompletionDispatcher(std::unique_ptr<grpc::ServerCompletionQueue> queue)
    : queue_(std::move(queue)) {}

CompletionDispatcher::~CompletionDispatcher() { Stop(); }

void CompletionDispatcher::Start(int threads) {
  const MayBeRefused refusal;
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Poll(); });
}

void CompletionDispatcher::Stop() {
  if (stopped_) return;
  stopped_ = true;
  queue_->Shutdown();
  // gRPC requires an empty queue, even if no thread was started.
  if (threads_.empty()) Poll();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void CompletionDispatcher::Poll() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok)) static_cast<Completion*>(tag)->Run(ok);
}

}  // namespace gradsync::daemon
