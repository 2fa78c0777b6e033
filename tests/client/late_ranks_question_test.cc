#include "client/src/late_ranks_question.h"

#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

v1::StepState Answer(std::uint64_t step, const char* missing) {
  v1::StepState state;
  state.set_step(step);
  state.set_missing(missing);
  return state;
}

TEST(LateRanksQuestionTest, WaitsOfOneStepShareAQuestion) {
  LateRanksQuestion question;
  v1::QueryStep query;
  EXPECT_TRUE(question.Ask(3, &query));
  EXPECT_EQ(query.step(), 3u);
  EXPECT_FALSE(question.Ask(3, &query));
  EXPECT_FALSE(question.answered());
  EXPECT_EQ(question.Answer(), LateRanksQuestion::kUnanswered);

  question.OnAnswer(Answer(3, "rank 1"));
  EXPECT_TRUE(question.answered());
  EXPECT_EQ(question.Answer(), "rank 1");
}

TEST(LateRanksQuestionTest, LaterTimeOutAsksAgain) {
  LateRanksQuestion question;
  v1::QueryStep query;
  EXPECT_TRUE(question.Ask(3, &query));
  question.OnAnswer(Answer(3, "rank 1"));
  EXPECT_TRUE(question.Ask(3, &query));
  EXPECT_FALSE(question.answered());
}

TEST(LateRanksQuestionTest, AnswerAboutAnotherStepIsNone) {
  LateRanksQuestion question;
  v1::QueryStep query;
  EXPECT_TRUE(question.Ask(3, &query));
  EXPECT_TRUE(question.Ask(4, &query));
  question.OnAnswer(Answer(3, "rank 1"));
  EXPECT_FALSE(question.answered());
  EXPECT_TRUE(question.Ask(4, &query));
  question.OnAnswer(Answer(4, ""));
  EXPECT_TRUE(question.answered());
  EXPECT_EQ(question.Answer(), LateRanksQuestion::kUnanswered);
}

}  // namespace
}  // namespace gradsync::client
