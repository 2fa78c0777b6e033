// One side of a bidirectional stream. It sends messages in order from a bounded queue, and receives
// them one at a time. Streams of trainers and streams between nodes use this class.

#ifndef DAEMON_RPC_MESSAGE_STREAM_H_
#define DAEMON_RPC_MESSAGE_STREAM_H_

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/mutex.h"
#include "daemon/rpc/completion_dispatcher.h"

namespace gradsync::daemon {

// The most that the other side may leave unread. If it leaves more, it is disconnected. A message
// that waits alone may have more bytes.
struct UnreadLimits {
  std::size_t messages = 0;
  std::size_t bytes = 0;
};

// `In` and `Out` are the messages of the wire. The queue holds an `Item` for each message; the
// thread that sends it converts it into an `Out`.
//
// Thread-safe. gRPC completes one read and one write at a time. A message is handled before the
// next one is read. Queue(), QueueIfGranted() and QueueEnd() call only BytesOf() and Grant(), so
// their callers may hold locks. Flush() calls gRPC, so its callers must hold none.
//
// Owns itself from Began() until its last operation has completed.
template <class In, class Out, class Item = Out>
class MessageStream : public std::enable_shared_from_this<MessageStream<In, Out, Item>> {
 public:
  explicit MessageStream(const UnreadLimits& limits) : limits_(limits) {}
  MessageStream(const MessageStream&) = delete;
  MessageStream& operator=(const MessageStream&) = delete;
  virtual ~MessageStream() = default;

  // Queues a message without sending it. Drops it if the stream has ended or a write has failed. If
  // the message exceeds the limits, or Grant() refuses it, the next Flush() disconnects the other
  // side.
  void Queue(Item item) {
    const std::size_t bytes = BytesOf(item);
    MutexLock lock(&mutex_);
    if (ended_ || overflow_ || broken_) return;
    refused_ = GrantLocked(bytes);
    QueueLocked(std::move(item), bytes);
  }

  // The same. But if Grant() refuses the message, returns why, and the stream goes on without it.
  absl::Status QueueIfGranted(Item item) {
    const std::size_t bytes = BytesOf(item);
    MutexLock lock(&mutex_);
    if (ended_ || overflow_ || broken_) return absl::OkStatus();
    if (absl::Status granted = GrantLocked(bytes); !granted.ok()) return granted;
    QueueLocked(std::move(item), bytes);
    return absl::OkStatus();
  }

  // Queues the stream's end with `status`. If `last` is set, queues it before the end; the limits
  // do not apply to it. Sends nothing. Only the first call counts.
  void QueueEnd(const absl::Status& status, std::optional<Item> last = std::nullopt) {
    const std::size_t bytes = last.has_value() ? BytesOf(*last) : 0;
    MutexLock lock(&mutex_);
    if (ended_) return;
    ended_ = true;
    end_ = status;
    if (last.has_value() && !overflow_) PushLocked(*std::move(last), bytes);
  }

  // Sends what is queued, one message at a time.
  void Flush() {
    enum { kNothing, kWrite, kFinish, kCancel } next = kNothing;
    absl::Status end;
    std::optional<Item> item;
    {
      MutexLock lock(&mutex_);
      if (!began_ || finished_) return;
      if (overflow_ && !cancelled_) {
        // Does not wait for the write that is under way: it may never complete.
        next = kCancel;
        cancelled_ = ended_ = true;
        DropQueueLocked();
      } else if (writing_) {
        return;
      } else if (!queue_.empty() && !broken_) {
        next = kWrite;
        writing_ = true;
        item = std::move(queue_.front().item);
        writing_bytes_ = queue_.front().bytes;
        queued_bytes_ -= writing_bytes_;
        queue_.pop_front();
        ++pending_;
      } else if (ended_ && (CanFinish() || done_reading_)) {
        next = kFinish;
        finished_ = true;
        end = end_;
        ++pending_;
      }
    }
    if (next == kWrite) {
      ToWire(*std::move(item), &outgoing_);
      StartWrite(outgoing_, &on_write_);
    }
    if (next == kFinish) StartFinish(end, &on_finish_);
    if (next == kCancel) Cancel();
  }

  void Send(Item item) {
    Queue(std::move(item));
    Flush();
  }

  // QueueEnd() and Flush().
  void Close(const absl::Status& status) {
    QueueEnd(status);
    Flush();
  }

  // True once this side has ended the stream.
  bool Ended() const {
    MutexLock lock(&mutex_);
    return ended_;
  }

  // Ends the stream at once. Queued messages are not sent.
  virtual void Cancel() = 0;

 protected:
  // ---- Called one at a time, by the queue's threads or by those that InTurn() chooses.
  // A message has come. This side may have ended the stream already.
  virtual void OnMessage(const In& message) = 0;
  // The last message has come. Called once. `end` is the status with which this side has ended the
  // stream, or OK if it has not.
  virtual void OnEnd(const absl::Status& end) = 0;
  // The stream is finished. For a client it is the last call, and the server's status is known.
  // On a server it may come before or during OnMessage() and OnEnd().
  virtual void OnFinished() {}

  // Decides when and where a message is handled, or the end of the messages (`message` is null).
  // Calls `take` once, now or later, on any thread. `take` handles it; with `drop` it drops a
  // message, but still handles the end. The stream may end and be destroyed within `take`.
  virtual void InTurn(const In* /*message*/, std::function<void(bool drop)> take) {
    const std::function<void(bool drop)> now = std::move(take);
    now(/*drop=*/false);
  }
  // True if a message has come and is not handled yet. Then the other side is not silent, although
  // nothing more is read. Any thread may ask.
  bool HasMessage() const { return has_message_.load(std::memory_order_acquire); }

  // Called when the queue and the message that is being written need `bytes` in all, more than
  // `*granted`, which is 0 at first. Either raises `*granted` to at least `bytes`, or changes
  // nothing and returns why not. Called with the queue's lock held.
  virtual absl::Status Grant(std::size_t bytes, std::size_t* granted) {
    *granted = bytes;
    return absl::OkStatus();
  }
  // No message waits or is being written: memory that was granted may be given back. Called with
  // the queue's lock held.
  virtual void Drained(std::size_t*) {}

  // Returns an estimate of an item's memory, in bytes.
  virtual std::size_t BytesOf(const Item& item) const = 0;
  // Converts an item into a message. `out` is empty.
  virtual void ToWire(Item item, Out* out) = 0;

  // ---- Start an operation of gRPC, which completes with `tag`.
  virtual void StartRead(In* message, void* tag) = 0;
  virtual void StartWrite(const Out& message, void* tag) = 0;
  virtual void StartFinish(const absl::Status& status, void* tag) = 0;
  // True if this side may finish before the other side ends. A server may.
  virtual bool CanFinish() const = 0;
  // True if the stream goes on after the other side has half-closed it, until this side ends it.
  // False: it ends at the half-close.
  virtual bool EndsByItself() const { return false; }

  // The stream has opened: starts to read, and sends what is queued.
  void Began() {
    self_ = this->shared_from_this();
    {
      MutexLock lock(&mutex_);
      began_ = true;
      ++pending_;
    }
    StartRead(&incoming_, &on_read_);
    Flush();
  }

  // The stream has not opened: finishes it. The final status says why.
  void BeganBroken() {
    self_ = this->shared_from_this();
    {
      MutexLock lock(&mutex_);
      began_ = broken_ = ended_ = done_reading_ = true;
      DropQueueLocked();
    }
    OnEnd(absl::OkStatus());
    Flush();
  }

  // If the other side was disconnected, says how much it left unread. Otherwise empty.
  std::string WhyDisconnected() const {
    MutexLock lock(&mutex_);
    if (!overflow_) return "";
    if (!refused_.ok()) {
      return absl::StrCat("it left ", unread_.messages, " messages unread, of ", unread_.bytes,
                          " bytes in all; ", refused_.message());
    }
    return absl::StrCat("it left ", unread_.messages, " messages unread, of ", unread_.bytes,
                        " bytes in all; ", limits_.messages, " messages and ", limits_.bytes,
                        " bytes are allowed");
  }

 private:
  struct Queued {
    Item item;
    std::size_t bytes = 0;
  };

  absl::Status GrantLocked(std::size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::size_t sum = queued_bytes_ + writing_bytes_ + bytes;
    return sum > granted_bytes_ ? Grant(sum, &granted_bytes_) : absl::OkStatus();
  }

  void QueueLocked(Item item, std::size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool too_long = queued_bytes_ + bytes > limits_.bytes && !queue_.empty();
    if (queue_.size() >= limits_.messages || too_long || !refused_.ok()) {
      overflow_ = true;
      unread_ = {queue_.size(), queued_bytes_};
      return;
    }
    PushLocked(std::move(item), bytes);
  }

  void PushLocked(Item item, std::size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    queued_bytes_ += bytes;
    queue_.push_back({std::move(item), bytes});
  }

  void DropQueueLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    queue_.clear();
    queued_bytes_ = 0;
    if (!writing_) Drained(&granted_bytes_);
  }

  void OnRead(bool ok) {
    has_message_.store(true, std::memory_order_relaxed);
    InTurn(ok ? &incoming_ : nullptr, [this, ok](bool drop) {
      if (ok) {
        TakeMessage(drop);
      } else {
        TakeEnd();
      }
    });
  }

  void TakeMessage(bool drop) {
    if (!drop) OnMessage(incoming_);
    incoming_ = In();  // a stream that is idle keeps no large message
    has_message_.store(false, std::memory_order_release);
    // The next read takes this one's place in pending_. The stream may end before StartRead()
    // returns, so nothing uses it afterwards.
    StartRead(&incoming_, &on_read_);
  }

  void TakeEnd() {
    const auto keep = self_;
    absl::Status end;
    {
      MutexLock lock(&mutex_);
      done_reading_ = true;
      end = end_;
    }
    OnEnd(end);
    if (!EndsByItself()) QueueEnd(absl::OkStatus());  // does nothing if this side has ended
    Flush();
    Completed();
  }

  void OnWrite(bool ok) {
    const auto keep = self_;
    outgoing_ = Out();
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      writing_bytes_ = 0;
      broken_ = broken_ || !ok;
      if (queue_.empty()) Drained(&granted_bytes_);
    }
    Flush();
    Completed();
  }

  void OnFinish(bool) {
    const auto keep = self_;
    OnFinished();
    Completed();
  }

  // An operation has completed. After the last one the stream no longer owns itself.
  void Completed() {
    std::shared_ptr<MessageStream> last;
    MutexLock lock(&mutex_);
    if (--pending_ == 0 && finished_ && done_reading_) last.swap(self_);
  }

  const UnreadLimits limits_;
  MethodCompletion<MessageStream, &MessageStream::OnRead> on_read_{this};
  MethodCompletion<MessageStream, &MessageStream::OnWrite> on_write_{this};
  MethodCompletion<MessageStream, &MessageStream::OnFinish> on_finish_{this};
  std::shared_ptr<MessageStream> self_;
  std::atomic<bool> has_message_{false};
  In incoming_;   // belongs to the read under way, then to InTurn() and OnMessage()
  Out outgoing_;  // belongs to the thread that set `writing_`, then to its write; empty otherwise

  mutable Mutex mutex_;
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  std::size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t writing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the message that is being written
  std::size_t granted_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);  // Grant()'s
  int pending_ ABSL_GUARDED_BY(mutex_) = 0;       // operations that gRPC has not completed
  bool began_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;    // a write failed
  bool overflow_ ABSL_GUARDED_BY(mutex_) = false;  // a limit was exceeded
  UnreadLimits unread_ ABSL_GUARDED_BY(mutex_);    // in the queue at that time
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;     // nothing more is queued
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // StartFinish() was called
  bool done_reading_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_MESSAGE_STREAM_H_
