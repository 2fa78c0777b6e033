#include "client/examples/digits_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gradsync::examples {
namespace {

using ::testing::HasSubstr;

constexpr char kDigits[] = "client/examples/data/digits.csv.gz";

std::string Line(int pixel, int label) {
  return absl::StrCat(absl::StrJoin(std::vector<int>(kPixels, pixel), ","), ",", label, "\n");
}

TEST(DigitsDataTest, HoldsOutEveryFifthOfTheRealDigits) {
  const absl::StatusOr<Digits> digits = LoadDigits(kDigits);
  ASSERT_TRUE(digits.ok()) << digits.status();
  EXPECT_EQ(digits->test.size(), 360u);
  EXPECT_EQ(digits->train.size(), 1437u);
  EXPECT_EQ(digits->train.pixels.size(), 1437u * kPixels);
  const auto [least, most] =
      std::minmax_element(digits->train.pixels.begin(), digits->train.pixels.end());
  EXPECT_EQ(*least, 0.0f);
  EXPECT_EQ(*most, 1.0f);
  for (std::uint8_t digit = 0; digit < kClasses; ++digit) {
    EXPECT_GT(std::count(digits->test.labels.begin(), digits->test.labels.end(), digit), 20);
  }
}

TEST(DigitsDataTest, TheFirstLineAndEveryFifthAfterItAreTheTest) {
  std::string csv;
  for (int i = 0; i < 7; ++i) csv += Line(i, i);
  const absl::StatusOr<Digits> digits = ParseDigits(csv, "memory");
  ASSERT_TRUE(digits.ok()) << digits.status();
  EXPECT_THAT(digits->test.labels, ::testing::ElementsAre(0, 5));
  EXPECT_THAT(digits->train.labels, ::testing::ElementsAre(1, 2, 3, 4, 6));
  EXPECT_EQ(digits->train.pixels[0], 1.0f / 16);
}

TEST(DigitsDataTest, MissingFileIsNamed) {
  const absl::Status status = LoadDigits("no/such/file").status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("no/such/file: No such file"));
}

TEST(DigitsDataTest, WrongLineIsNamed) {
  const struct {
    std::string line;
    const char* complaint;
  } kCases[] = {
      {"1,2,3\n", "memory:2: expected 64 pixels and a label, found 3 columns"},
      {Line(17, 1), "memory:2: pixel 1 is '17', not 0 to 16"},
      {Line(-1, 1), "memory:2: pixel 1 is '-1', not 0 to 16"},
      {Line(1, 10), "memory:2: the label is '10', not 0 to 9"},
      {"\n", "memory:2: expected 64 pixels and a label, found 1 columns"},
  };
  for (const auto& wrong : kCases) {
    const absl::Status status = ParseDigits(Line(1, 1) + wrong.line, "memory").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_EQ(status.message(), wrong.complaint);
  }
}

TEST(DigitsDataTest, RefusesAFileWithoutTrainingSamples) {
  EXPECT_TRUE(absl::IsInvalidArgument(ParseDigits(Line(1, 1), "memory").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ParseDigits("", "memory").status()));
}

}  // namespace
}  // namespace gradsync::examples
