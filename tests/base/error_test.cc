#include "daemon/base/error.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace gradsync {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

TEST(ErrorTest, AnErrorGivesBackWhatItWasMadeOf) {
  const absl::Status status = MakeError(absl::StatusCode::kAborted, "RANK_LOST", "rank 1 is gone",
                                        {{"job", "run 7"}, {"rank", "1"}, {"bucket", ""}});
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "rank 1 is gone");
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(details.reason, "RANK_LOST");
  EXPECT_EQ(details.fields, (Fields{{"job", "run 7"}, {"rank", "1"}, {"bucket", ""}}));
}

TEST(ErrorTest, AnErrorMayHaveNoFields) {
  const ErrorDetails details =
      DetailsOf(MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon stops"));
  EXPECT_EQ(details.reason, "DRAINING");
  EXPECT_TRUE(details.fields.empty());
}

TEST(ErrorTest, WhatWasMadeOtherwiseHasNoReason) {
  for (const absl::Status& status : {absl::OkStatus(), absl::NotFoundError("nothing")}) {
    EXPECT_EQ(DetailsOf(status).reason, "");
    EXPECT_TRUE(DetailsOf(status).fields.empty());
  }
}

TEST(ErrorTest, ValuesAreCutAtNulAndShiftNoOtherField) {
  using std::string_literals::operator""s;
  const ErrorDetails details = DetailsOf(
      MakeError(absl::StatusCode::kInternal, "A\0B"s, "", {{"job", "x\0rank"s}, {"rank", "2"}}));
  EXPECT_EQ(details.reason, "A");
  EXPECT_EQ(details.fields, (Fields{{"job", "x"}, {"rank", "2"}}));
}

TEST(ErrorTest, ValuesMayHoldAnythingElse) {
  const std::string value = "\xff=,'\"\n\x01 \xc3\xa4";
  const ErrorDetails details =
      DetailsOf(MakeError(absl::StatusCode::kInternal, "X", "", {{"job", value}}));
  EXPECT_EQ(details.fields, (Fields{{"job", value}}));
}

TEST(ErrorTest, ACopyHasTheSameDetails) {
  absl::Status copy;
  {
    const absl::Status status =
        MakeError(absl::StatusCode::kAborted, "SUPERSEDED", "", {{"rank", "3"}});
    copy = status;
  }
  EXPECT_EQ(DetailsOf(copy).reason, "SUPERSEDED");
  EXPECT_EQ(DetailsOf(copy).fields, (Fields{{"rank", "3"}}));
}

TEST(ErrorTest, OkStaysOk) {
  EXPECT_TRUE(MakeError(absl::StatusCode::kOk, "X", "message", {{"rank", "1"}}).ok());
}

}  // namespace
}  // namespace gradsync
