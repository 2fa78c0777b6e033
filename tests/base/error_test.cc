#include "daemon/base/error.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace gradsync::daemon {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

TEST(ErrorTest, KeepsReasonMessageAndFields) {
  const absl::Status status =
      MakeError(absl::StatusCode::kAborted, reason::kRankLost, "rank 1 was lost",
                {{field::kJob, "run 7"}, {field::kRank, "1"}, {field::kBucket, ""}});
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "rank 1 was lost");
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(details.reason, "RANK_LOST");
  EXPECT_EQ(details.fields, (Fields{{"job", "run 7"}, {"rank", "1"}, {"bucket", ""}}));
}

TEST(ErrorTest, HasNoFieldsByDefault) {
  const ErrorDetails details =
      DetailsOf(MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the daemon stops"));
  EXPECT_EQ(details.reason, "DRAINING");
  EXPECT_TRUE(details.fields.empty());
}

TEST(ErrorTest, OtherStatusesHaveNoReason) {
  for (const absl::Status& status : {absl::OkStatus(), absl::NotFoundError("nothing")}) {
    EXPECT_EQ(DetailsOf(status).reason, "");
    EXPECT_TRUE(DetailsOf(status).fields.empty());
  }
}

TEST(ErrorTest, ValuesEndAtNul) {
  using std::string_literals::operator""s;
  const ErrorDetails details =
      DetailsOf(MakeError(absl::StatusCode::kInternal, Reason("A\0B"s), "",
                          {{field::kJob, "x\0rank"s}, {field::kRank, "2"}}));
  EXPECT_EQ(details.reason, "A");
  EXPECT_EQ(details.fields, (Fields{{"job", "x"}, {"rank", "2"}}));
}

TEST(ErrorTest, ValuesKeepAllOtherBytes) {
  const std::string value = "\xff=,'\"\n\x01 \xc3\xa4";
  const ErrorDetails details =
      DetailsOf(MakeError(absl::StatusCode::kInternal, Reason("X"), "", {{field::kJob, value}}));
  EXPECT_EQ(details.fields, (Fields{{"job", value}}));
}

TEST(ErrorTest, ValidTextIsKept) {
  const std::string text = "a\u00e4\u20ac\U0001F600\uFFFD\U0010FFFF\n\x7f";
  EXPECT_EQ(ValidText(text, text.size()), text);
  EXPECT_EQ(ValidText("", 0), "");
}

TEST(ErrorTest, TextThatIsNoUtf8HasQuestionMarks) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a\x80z", "a?z"},   // a part of a character
      {"\xc3z", "?z"},     // its begin
      {"\xe2\x82", "??"},  // at the end
      {"\xf0\x9f\x98z", "???z"},
      {"\xc0\xaf", "??"},  // longer forms than needed
      {"\xe0\x9f\xbf", "???"},
      {"\xf0\x8f\xbf\xbf", "????"},
      {"\xed\xa0\x80", "???"},       // a surrogate
      {"\xf4\x90\x80\x80", "????"},  // beyond Unicode
      {"\xf5\xff\xfe", "???"},
      {"\xc3\xa4\xff\xc3\xa4", "\u00e4?\u00e4"},
  };
  for (const auto& [text, valid] : cases) EXPECT_EQ(ValidText(text, 100), valid);
}

TEST(ErrorTest, ValidTextIsCutBetweenCharacters) {
  EXPECT_EQ(ValidText("ab\u00e4", 3), "ab");
  EXPECT_EQ(ValidText("ab\u00e4", 4), "ab\u00e4");
  EXPECT_EQ(ValidText("ab", 0), "");
}

TEST(ErrorTest, CopyHasTheSameDetails) {
  absl::Status copy;
  {
    const absl::Status status =
        MakeError(absl::StatusCode::kAborted, reason::kSuperseded, "", {{field::kRank, "3"}});
    copy = status;
  }
  EXPECT_EQ(DetailsOf(copy).reason, "SUPERSEDED");
  EXPECT_EQ(DetailsOf(copy).fields, (Fields{{"rank", "3"}}));
}

TEST(ErrorTest, OkHasNoDetails) {
  EXPECT_TRUE(MakeError(absl::StatusCode::kOk, Reason("X"), "message", {{field::kRank, "1"}}).ok());
}

}  // namespace
}  // namespace gradsync::daemon
