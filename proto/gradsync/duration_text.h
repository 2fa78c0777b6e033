// Durations in messages for people.

#ifndef PROTO_GRADSYNC_DURATION_TEXT_H_
#define PROTO_GRADSYNC_DURATION_TEXT_H_

#include <string>

#include "absl/time/time.h"

namespace gradsync {

// "1m5s", "5s", "1.2s", "30ms": rounded to seconds; below 10 s to tenths, below 1 s to
// milliseconds.
inline std::string DurationText(absl::Duration duration) {
  const absl::Duration size = absl::AbsDuration(duration);
  const absl::Duration unit = size >= absl::Seconds(10)  ? absl::Seconds(1)
                              : size >= absl::Seconds(1) ? absl::Milliseconds(100)
                                                         : absl::Milliseconds(1);
  return absl::FormatDuration(absl::Floor(duration + unit / 2, unit));
}

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_DURATION_TEXT_H_
