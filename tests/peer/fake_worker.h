// A fake of a worker. The test answers its calls.

#ifndef TESTS_PEER_FAKE_WORKER_H_
#define TESTS_PEER_FAKE_WORKER_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "daemon/worker/worker_port.h"

namespace gradsync::daemon {

// Not thread-safe.
class FakeWorker final : public WorkerPort {
 public:
  void Call(worker::Call call, std::vector<UniqueFd>, Answered answered) override {
    calls.push_back(std::move(call));
    answers.push_back(std::move(answered));
  }
  void Kill(const absl::Status& why) override {
    killed = why;
    for (std::size_t i = answered_; i < answers.size(); ++i) answers[i](why);
    answered_ = answers.size();
  }
  absl::Status EndReason() const override { return killed; }

  std::size_t unanswered() const { return answers.size() - answered_; }
  // Answers the oldest unanswered call.
  void Answer(absl::StatusOr<Reply> reply) { answers[answered_++](std::move(reply)); }

  std::vector<worker::Call> calls;
  std::vector<Answered> answers;
  absl::Status killed;

 private:
  std::size_t answered_ = 0;
};

}  // namespace gradsync::daemon

#endif  // TESTS_PEER_FAKE_WORKER_H_
