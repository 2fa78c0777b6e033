// Runs threads that take events from a completion queue of gRPC and call each event's Completion.
//
// Streams use this instead of gRPC's callback API. In gRPC 1.51 that API sleeps 100 ms after every
// idle second (CallbackAlternativeCQ), and a trainer's next bucket would wait for it. The threads
// here sleep in epoll.

#ifndef DAEMON_RPC_COMPLETION_DISPATCHER_H_
#define DAEMON_RPC_COMPLETION_DISPATCHER_H_

#include <grpcpp/completion_queue.h>

#include <memory>
#include <thread>
#include <vector>

namespace gradsync::daemon {

// Called when an asynchronous operation completes. Its address is the operation's tag.
class Completion {
 public:
  // `ok` is false if the operation failed or the stream has ended.
  virtual void Run(bool ok) = 0;

 protected:
  ~Completion() = default;
};

// A completion that calls a method of `target`. The target outlives the operation.
template <class Target, void (Target::*method)(bool)>
class MethodCompletion final : public Completion {
 public:
  explicit MethodCompletion(Target* target) : target_(target) {}
  void Run(bool ok) override { (target_->*method)(ok); }

 private:
  Target* const target_;
};

// Owns the queue and its threads. One thread calls Start and Stop.
class CompletionDispatcher {
 public:
  explicit CompletionDispatcher(std::unique_ptr<grpc::ServerCompletionQueue> queue);
  CompletionDispatcher(const CompletionDispatcher&) = delete;
  CompletionDispatcher& operator=(const CompletionDispatcher&) = delete;
  ~CompletionDispatcher();

  grpc::ServerCompletionQueue* queue() const { return queue_.get(); }

  // The thread that takes a message also does the work that it causes, down to the reduction of a
  // small bucket, unless the stream leaves it to another one (MessageStream::InTurn).
  // Throws std::system_error if the system refuses a thread.
  void Start(int threads);
  // Runs the remaining events and joins the threads. Requires that the server that uses the queue
  // has been shut down. Idempotent.
  void Stop();

 private:
  void Poll();

  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::vector<std::thread> threads_;
  bool stopped_ = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_COMPLETION_DISPATCHER_H_
