// One side of a stream between two daemons: messages go out in order through a bounded queue, and
// come in one at a time.

#ifndef DAEMON_PEER_MESSAGE_STREAM_H_
#define DAEMON_PEER_MESSAGE_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"

namespace gradsync {

// A completion queue's tag: what to do when the operation is complete.
class PeerCompletion {
 public:
  virtual void Run(bool ok) = 0;

 protected:
  ~PeerCompletion() = default;
};

// Both sides speak this version, and no other yet.
inline constexpr std::uint32_t kPeerProtocol = 1;

// Thread-safe, except for what gRPC's queue calls: one operation of a kind at a time. Owns itself
// from Began() until its last operation is complete. No lock is held while gRPC or a receiver is
// called.
template <class In, class Out>
class MessageStream : public std::enable_shared_from_this<MessageStream<In, Out>> {
 public:
  // The other side is cut off at this many messages that it has not taken, or bytes of them: the
  // largest layouts of all ranks of a large node.
  static constexpr std::size_t kMaxQueued = 1 << 16;
  static constexpr std::size_t kMaxQueuedBytes = std::size_t{256} << 20;

  virtual ~MessageStream() = default;

  // Queues the message; calls nobody.
  void Queue(Out message) {
    const std::size_t bytes = message.ByteSizeLong();
    MutexLock lock(&mutex_);
    if (ended_) return;
    if (queue_.size() >= kMaxQueued || queued_bytes_ + bytes > kMaxQueuedBytes) {
      overflow_ = true;
      return;
    }
    queued_bytes_ += bytes;
    queue_.push_back({std::move(message), bytes});
  }

  // Sends what is queued.
  void Flush() {
    enum { kNothing, kWrite, kFinish, kCancel } next = kNothing;
    absl::Status end;
    {
      MutexLock lock(&mutex_);
      if (!began_ || finished_) return;
      if (overflow_) {
        // Also, and above all, while a write does not get away.
        next = kCancel;
        overflow_ = false;
        ended_ = true;
        DropQueueLocked();
      } else if (writing_) {
        return;
      } else if (!queue_.empty() && !broken_) {
        next = kWrite;
        writing_ = true;
        outgoing_ = std::move(queue_.front().message);
        queued_bytes_ -= queue_.front().bytes;
        queue_.pop_front();
        ++pending_;
      } else if (ended_ && (CanFinish() || done_reading_)) {
        next = kFinish;
        finished_ = true;
        end = end_;
        ++pending_;
      }
    }
    if (next == kWrite) StartWrite(outgoing_, &on_write_);
    if (next == kFinish) StartFinish(end, &on_finish_);
    if (next == kCancel) Cancel();
  }

  void Send(Out message) {
    Queue(std::move(message));
    Flush();
  }

  // Nothing more is queued; ends once what is has gone out.
  void Close(const absl::Status& status) {
    {
      MutexLock lock(&mutex_);
      if (ended_) return;
      ended_ = true;
      end_ = status;
    }
    Flush();
  }

  // Ends at once.
  virtual void Cancel() = 0;

 protected:
  // On the queue's threads.
  virtual void OnMessage(const In& message) = 0;
  // Nothing more comes; called once.
  virtual void OnEnd() = 0;
  // The last call; the status is the client's to read.
  virtual void OnFinished() {}

  virtual void StartRead(In* message, void* tag) = 0;
  virtual void StartWrite(const Out& message, void* tag) = 0;
  virtual void StartFinish(const absl::Status& status, void* tag) = 0;
  // Whether this side may finish before the other has.
  virtual bool CanFinish() const = 0;

  // The stream is open: reads from now on, and writes what was queued before.
  void Began() {
    self_ = this->shared_from_this();
    {
      MutexLock lock(&mutex_);
      began_ = true;
    }
    Read();
    Flush();
  }

  // It did not open: finishes, to learn why.
  void BeganBroken() {
    self_ = this->shared_from_this();
    {
      MutexLock lock(&mutex_);
      began_ = broken_ = ended_ = done_reading_ = true;
      DropQueueLocked();
    }
    OnEnd();
    Flush();
  }

 private:
  template <void (MessageStream::*method)(bool)>
  class Step final : public PeerCompletion {
   public:
    explicit Step(MessageStream* stream) : stream_(stream) {}
    void Run(bool ok) override { (stream_->*method)(ok); }

   private:
    MessageStream* const stream_;
  };

  struct Queued {
    Out message;
    std::size_t bytes = 0;
  };

  void DropQueueLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    queue_.clear();
    queued_bytes_ = 0;
  }

  void Read() {
    {
      MutexLock lock(&mutex_);
      ++pending_;
    }
    StartRead(&incoming_, &on_read_);
  }

  void OnRead(bool ok) {
    const auto keep = self_;
    if (ok) {
      OnMessage(incoming_);
      Read();
    } else {
      {
        MutexLock lock(&mutex_);
        done_reading_ = true;
        DropQueueLocked();  // goes nowhere
        if (!ended_) {
          ended_ = true;
          end_ = absl::OkStatus();
        }
      }
      OnEnd();
      Flush();
    }
    Completed();
  }

  void OnWrite(bool ok) {
    const auto keep = self_;
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      broken_ = broken_ || !ok;
    }
    Flush();
    Completed();
  }

  void OnFinish(bool) {
    const auto keep = self_;
    OnFinished();
    Completed();
  }

  void Completed() {
    std::shared_ptr<MessageStream> last;
    MutexLock lock(&mutex_);
    if (--pending_ == 0 && finished_ && done_reading_) last.swap(self_);
  }

  Step<&MessageStream::OnRead> on_read_{this};
  Step<&MessageStream::OnWrite> on_write_{this};
  Step<&MessageStream::OnFinish> on_finish_{this};
  std::shared_ptr<MessageStream> self_;
  In incoming_;   // the read side's
  Out outgoing_;  // the writer's, while writing_

  Mutex mutex_;
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  std::size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int pending_ ABSL_GUARDED_BY(mutex_) = 0;  // operations that gRPC has not completed
  bool began_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;    // a write failed
  bool overflow_ ABSL_GUARDED_BY(mutex_) = false;  // the other side does not read
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;     // nothing more is queued
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // StartFinish() was called
  bool done_reading_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync

#endif  // DAEMON_PEER_MESSAGE_STREAM_H_
