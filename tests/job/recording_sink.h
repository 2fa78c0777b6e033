// A session sink that keeps a job's messages for a test to read.

#ifndef TESTS_JOB_RECORDING_SINK_H_
#define TESTS_JOB_RECORDING_SINK_H_

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "daemon/job/session_message.h"

namespace gradsync::daemon {

// Not thread-safe: for tests that run everything on their own thread.
class RecordingSink final : public SessionSink {
 public:
  // `on_message` is called as each message is queued, under the job's lock: it may look at what the
  // trainer would see, but must not call the job.
  explicit RecordingSink(std::function<void(const SessionMessage&)> on_message = {})
      : on_message_(std::move(on_message)) {}

  void Queue(SessionMessage message) override {
    if (on_message_) on_message_(message);
    messages_.push_back(std::move(message));
  }
  void Flush() override { flushed_ = messages_.size(); }
  bool IsAbandoned() const override { return abandoned_; }
  // The trainer's stream ends.
  void Abandon() { abandoned_ = true; }

  // All messages queued since the last Take(), flushed or not.
  std::vector<SessionMessage> Take() {
    flushed_ = 0;
    return std::exchange(messages_, {});
  }
  const std::vector<SessionMessage>& messages() const { return messages_; }
  // True if every queued message has been flushed.
  bool AllFlushed() const { return flushed_ == messages_.size(); }

  // All messages of one kind since the last Take(), in order.
  template <typename Message>
  std::vector<Message> Of() const {
    std::vector<Message> found;
    for (const SessionMessage& message : messages_) {
      if (const auto* match = std::get_if<Message>(&message)) found.push_back(*match);
    }
    return found;
  }

 private:
  const std::function<void(const SessionMessage&)> on_message_;
  std::vector<SessionMessage> messages_;
  bool abandoned_ = false;
  std::size_t flushed_ = 0;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_RECORDING_SINK_H_
