// Shows how far a training is: a bar that is redrawn on a terminal, a few plain lines elsewhere.

#ifndef CLIENT_EXAMPLES_PROGRESS_H_
#define CLIENT_EXAMPLES_PROGRESS_H_

#include <cstdint>
#include <string>

#include "client/examples/report.h"
#include "client/examples/text_style.h"

namespace gradsync::examples {

// Not thread-safe.
class Progress {
 public:
  Progress(std::uint64_t steps, const TextStyle& style) : steps_(steps), style_(style) {}

  // What to print for this report: may be nothing, may redraw the line before.
  std::string Update(const ProgressReport& report);

 private:
  const std::uint64_t steps_;
  const TextStyle style_;
  std::uint64_t next_line_ = 0;  // without a terminal: the step that is worth a line
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_PROGRESS_H_
