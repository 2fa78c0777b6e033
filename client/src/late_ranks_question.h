// The question that a rank asks the daemon after a time-out: which ranks are late?

#ifndef CLIENT_SRC_LATE_RANKS_QUESTION_H_
#define CLIENT_SRC_LATE_RANKS_QUESTION_H_

#include <cstdint>
#include <optional>
#include <string>

namespace gradsync::v1 {
class QueryStep;
class StepState;
}  // namespace gradsync::v1

namespace gradsync::client {

// Several waits of one step share a question. A value; thread-compatible. Legal call order:
//
//   (Ask OnAnswer*)*
class LateRanksQuestion {
 public:
  // What an error says instead of an answer.
  static constexpr char kUnanswered[] = "the daemon has not said which ranks are late";

  // True if the daemon must be asked: then `query` is the question, without its channel. False: a
  // question about `step` already waits for its answer.
  bool Ask(std::uint64_t step, v1::QueryStep* query);
  // Ends the question. If `state` is about another step, the question gets no answer.
  void OnAnswer(const v1::StepState& state);

  bool answered() const { return missing_.has_value(); }
  // For an error's message: which ranks are late, or kUnanswered.
  std::string Answer() const;

 private:
  std::uint64_t step_ = 0;              // of the question that waits for its answer; 0: none
  std::optional<std::string> missing_;  // the answer to the last question
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_LATE_RANKS_QUESTION_H_
