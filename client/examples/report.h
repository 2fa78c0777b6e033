// What a trainer tells whoever started it: JSON on its standard output, one object a line.

#ifndef CLIENT_EXAMPLES_REPORT_H_
#define CLIENT_EXAMPLES_REPORT_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/examples/step_trace.h"

namespace gradsync::examples {

struct BucketReport {
  std::uint64_t bytes = 0;
  std::vector<std::string> parameters;  // whose gradients it holds
};

// Every rank has joined and registered.
struct JoinedReport {
  std::vector<BucketReport> buckets;
};

// From rank 0, now and then.
struct ProgressReport {
  std::uint64_t step = 0;
  float loss = 0;       // of this step's batch, over all ranks
  double accuracy = 0;  // percent of the held-out samples
};

// The last word of a trainer. The traces of its last steps come right before it.
struct FinishedReport {
  double accuracy = 0;  // percent; from rank 0, else 0
  // Whether this rank's parameters are rank 0's, bit by bit.
  bool parameters_equal = false;
};

using Report = std::variant<JoinedReport, ProgressReport, StepTrace, FinishedReport>;

// One line, with its newline.
std::string FormatReport(const Report& report);
// INVALID_ARGUMENT: not a line of FormatReport().
absl::StatusOr<Report> ParseReport(absl::string_view line);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_REPORT_H_
