// Durations in messages for people.

#ifndef PROTO_GRADSYNC_DURATION_TEXT_H_
#define PROTO_GRADSYNC_DURATION_TEXT_H_

#include <string>

#include "absl/time/time.h"

namespace gradsync {

// "1m5s", "5s", "1.2s", "30ms", "0s": rounded to seconds; below 10 s to tenths, below 1 s to
// milliseconds.
inline std::string DurationText(absl::Duration duration) {
  const absl::Duration size = absl::AbsDuration(duration);
  const absl::Duration unit = size >= absl::Seconds(10)  ? absl::Seconds(1)
                              : size >= absl::Seconds(1) ? absl::Milliseconds(100)
                                                         : absl::Milliseconds(1);
  const absl::Duration rounded = absl::Floor(duration + unit / 2, unit);
  return rounded == absl::ZeroDuration() ? "0s" : absl::FormatDuration(rounded);
}

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_DURATION_TEXT_H_
