#include "client/src/session_stream.h"

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <pthread.h>

#include <csignal>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/src/daemon_silence.h"
#include "client/src/error.h"
#include "client/src/fork_guard.h"
#include "proto/gradsync/v1/gradsync.grpc.pb.h"

namespace gradsync::client {
namespace {

// Enough for LayoutAssigned and StepDone of a large model.
constexpr int kMaxMessageBytes = 256 << 20;
constexpr std::size_t kPooledMessages = 16;
// The most buckets in one BucketReady, which then fits kMaxRequestBytes.
constexpr int kBucketsPerMessage = 8192;
// gRPC 1.51 opens up to five when it starts, and aborts the process if it gets none.
constexpr int kDescriptorsOfGrpc = 8;

// The operation that is complete. The queue serves one stream.
enum Tag : std::uintptr_t { kStarted = 1, kRead, kWritten, kFinished };
void* TagOf(Tag tag) { return reinterpret_cast<void*>(tag); }

}  // namespace

class SessionStream::Impl {
 public:
  Impl(int fd, GuardedSocket guard, std::shared_ptr<StreamReceiver> receiver)
      : receiver_(std::move(receiver)), guard_(std::move(guard)) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    arguments.SetMaxSendMessageSize(kMaxMessageBytes);
    call_->channel = grpc::experimental::CreateCustomInsecureChannelWithInterceptorsFromFd(
        "gradsyncd", fd, arguments, {});
    call_->stub = v1::GradientSync::NewStub(call_->channel);
    call_->stream = call_->stub->PrepareAsyncSession(&call_->context, &queue_);
    call_->stream->StartCall(TagOf(kStarted));
  }

  // The body of the stream's thread.
  void Run();

  void Send(std::vector<v1::SessionRequest> requests) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    for (v1::SessionRequest& request : requests) {
      EnqueueLocked(std::make_unique<v1::SessionRequest>(std::move(request)));
    }
  }
  void Send(std::unique_ptr<v1::SessionRequest> request) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    EnqueueLocked(std::move(request));
  }
  void SendBucketReady(std::uint32_t channel, std::uint64_t step, std::uint32_t bucket,
                       const Position* position) ABSL_LOCKS_EXCLUDED(mutex_);

  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (call_ != nullptr) call_->context.TryCancel();
  }
  // False if the stream has not ended within `timeout`.
  bool AwaitEnd(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&end_reported_), timeout);
  }

 private:
  void EnqueueLocked(std::unique_ptr<v1::SessionRequest> request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteNextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the writes; finishes the call when none is in flight.
  void FinishLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Destroyed in the reverse order: the call before its channel.
  struct Call {
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<v1::GradientSync::Stub> stub;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream;
  };

  // Used by the stream's thread only.
  std::shared_ptr<StreamReceiver> receiver_;
  v1::SessionResponse response_;
  grpc::Status status_;

  // Own synchronization. Outlives the call.
  grpc::CompletionQueue queue_;

  absl::Mutex mutex_;
  // Null once the stream has ended, so that its socket does not live as long as a Session or Layout
  // that nobody uses any more. Only the stream's thread resets it.
  std::unique_ptr<Call> call_ ABSL_GUARDED_BY(mutex_) = std::make_unique<Call>();
  GuardedSocket guard_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool end_reported_ ABSL_GUARDED_BY(mutex_) = false;
  // The message in flight; gRPC reads it until it is written.
  std::unique_ptr<v1::SessionRequest> writing_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<v1::SessionRequest>> waiting_ ABSL_GUARDED_BY(mutex_);
  // Used BucketReady messages, so that the hot path allocates nothing.
  std::vector<std::unique_ptr<v1::SessionRequest>> pool_ ABSL_GUARDED_BY(mutex_);
};

void SessionStream::Impl::Run() {
  grpc::ClientAsyncReaderWriter<v1::SessionRequest, v1::SessionResponse>* stream = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    stream = call_->stream.get();
  }
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
    switch (static_cast<Tag>(reinterpret_cast<std::uintptr_t>(tag))) {
      case kStarted: {
        if (ok) stream->Read(&response_, TagOf(kRead));
        absl::MutexLock lock(&mutex_);
        started_ = true;
        if (ok) {
          WriteNextLocked();
        } else {
          FinishLocked();
        }
        break;
      }
      case kRead:
        if (ok) {
          receiver_->OnMessage(response_);
          stream->Read(&response_, TagOf(kRead));
        } else {
          absl::MutexLock lock(&mutex_);
          FinishLocked();
        }
        break;
      case kWritten: {
        absl::MutexLock lock(&mutex_);
        if (writing_->has_bucket_ready() && pool_.size() < kPooledMessages) {
          pool_.push_back(std::move(writing_));
        }
        writing_ = nullptr;
        if (finishing_) {
          stream->Finish(&status_, TagOf(kFinished));
        } else if (ok) {
          WriteNextLocked();
        }
        // Not ok: the pending read fails too.
        break;
      }
      case kFinished: {
        receiver_->OnStreamEnd({static_cast<int>(status_.error_code()), status_.error_message(),
                                status_.error_details()});
        receiver_.reset();
        // Destroyed without the lock, and the guard after the socket.
        GuardedSocket guard;
        std::unique_ptr<Call> ended;
        {
          absl::MutexLock lock(&mutex_);
          guard = std::move(guard_);
          ended = std::move(call_);
        }
        ended.reset();
        queue_.Shutdown();
        absl::MutexLock lock(&mutex_);
        end_reported_ = true;
        break;
      }
    }
  }
}

void SessionStream::Impl::EnqueueLocked(std::unique_ptr<v1::SessionRequest> request) {
  if (finishing_) return;
  waiting_.push_back(std::move(request));
  if (started_ && writing_ == nullptr) WriteNextLocked();
}

void SessionStream::Impl::WriteNextLocked() {
  if (waiting_.empty()) return;
  writing_ = std::move(waiting_.front());
  waiting_.pop_front();
  call_->stream->Write(*writing_, TagOf(kWritten));
}

void SessionStream::Impl::FinishLocked() {
  finishing_ = true;
  waiting_.clear();
  if (writing_ == nullptr) call_->stream->Finish(&status_, TagOf(kFinished));
}

void SessionStream::Impl::SendBucketReady(std::uint32_t channel, std::uint64_t step,
                                          std::uint32_t bucket, const Position* position) {
  absl::MutexLock lock(&mutex_);
  if (!waiting_.empty() && waiting_.back()->has_bucket_ready()) {
    v1::BucketReady& last = *waiting_.back()->mutable_bucket_ready();
    if (last.channel() == channel && last.step() == step &&
        last.buckets_size() < kBucketsPerMessage) {
      last.add_buckets(bucket);
      return;
    }
  }
  std::unique_ptr<v1::SessionRequest> request;
  if (pool_.empty()) {
    request = std::make_unique<v1::SessionRequest>();
  } else {
    request = std::move(pool_.back());
    pool_.pop_back();
  }
  v1::BucketReady& ready = *request->mutable_bucket_ready();
  ready.set_channel(channel);
  ready.set_step(step);
  ready.clear_buckets();
  ready.add_buckets(bucket);
  ready.clear_position();
  if (position != nullptr) {
    ready.mutable_position()->set_epoch(position->epoch);
    ready.mutable_position()->set_batch(position->batch);
  }
  EnqueueLocked(std::move(request));
}

absl::StatusOr<std::unique_ptr<SessionStream>> SessionStream::Open(
    FileDescriptor socket, std::shared_ptr<StreamReceiver> receiver) {
  if (auto spare = CheckSpareDescriptors(socket, kDescriptorsOfGrpc); !spare.ok()) return spare;
  auto guard = GuardedSocket::Guard(socket.get());
  if (!guard.ok()) return guard.status();
  // Blocks the trainer's signals in this thread and in those that gRPC starts.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto impl = std::make_shared<Impl>(socket.Release(), *std::move(guard), std::move(receiver));
  std::thread thread;
  try {
    thread = std::thread([impl] {
      pthread_setname_np(pthread_self(), "gradsync");
      impl->Run();
    });
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!thread.joinable()) {
    impl->Cancel();
    impl->Run();
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                     "no thread could be started; raise the process limit (ulimit -u)");
  }
  return std::unique_ptr<SessionStream>(new SessionStream(std::move(impl), std::move(thread)));
}

SessionStream::SessionStream(std::shared_ptr<Impl> impl, std::thread thread)
    : impl_(std::move(impl)), thread_(std::move(thread)) {}

SessionStream::~SessionStream() {
  Close();
  // Joined, so that nothing of the session runs after main() returns.
  if (impl_->AwaitEnd(absl::ZeroDuration()) && thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void SessionStream::Send(v1::SessionRequest request) {
  sent_ns_.store(MonotonicNs(), std::memory_order_relaxed);
  impl_->Send(std::make_unique<v1::SessionRequest>(std::move(request)));
}

void SessionStream::Send(std::vector<v1::SessionRequest> requests) {
  sent_ns_.store(MonotonicNs(), std::memory_order_relaxed);
  impl_->Send(std::move(requests));
}

void SessionStream::SendBucketReady(std::uint32_t channel, std::uint64_t step, std::uint32_t bucket,
                                    const Position* position) {
  sent_ns_.store(MonotonicNs(), std::memory_order_relaxed);
  impl_->SendBucketReady(channel, step, bucket, position);
}

void SessionStream::Close() {
  impl_->Cancel();
  if (thread_.get_id() != std::this_thread::get_id()) impl_->AwaitEnd(absl::Seconds(5));
}

}  // namespace gradsync::client
