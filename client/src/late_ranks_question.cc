#include "client/src/late_ranks_question.h"

#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {

bool LateRanksQuestion::Ask(std::uint64_t step, v1::QueryStep* query) {
  if (step_ == step) return false;
  step_ = step;
  missing_.reset();
  query->set_step(step);
  return true;
}

void LateRanksQuestion::OnAnswer(const v1::StepState& state) {
  if (state.step() == step_) missing_ = state.missing();
  step_ = 0;
}

std::string LateRanksQuestion::Answer() const {
  return missing_.has_value() && !missing_->empty() ? *missing_ : kUnanswered;
}

}  // namespace gradsync::client
