#include "gradsync/duration_text.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace gradsync {
namespace {

TEST(DurationText, IsRoundedForPeople) {
  const std::vector<std::pair<absl::Duration, std::string>> texts = {
      {absl::ZeroDuration(), "0s"},
      {absl::Microseconds(499), "0s"},
      {absl::Microseconds(500), "1ms"},
      {absl::Milliseconds(30), "30ms"},
      {absl::Microseconds(999'499), "999ms"},
      {absl::Microseconds(999'500), "1s"},
      {absl::Milliseconds(1249), "1.2s"},
      {absl::Milliseconds(1250), "1.3s"},
      {absl::Milliseconds(9999), "10s"},
      {absl::Milliseconds(10'499), "10s"},
      {absl::Seconds(60) + absl::Nanoseconds(140'294), "1m"},
      {absl::Milliseconds(64'500), "1m5s"},
      {absl::Hours(25), "25h"},
      {-absl::Milliseconds(30), "-30ms"},
      {absl::InfiniteDuration(), "inf"},
  };
  for (const auto& [duration, text] : texts) EXPECT_EQ(DurationText(duration), text);
}

}  // namespace
}  // namespace gradsync
