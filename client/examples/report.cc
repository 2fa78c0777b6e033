#include "client/examples/report.h"

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::examples {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BucketReport, bytes, parameters)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(JoinedReport, buckets)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ProgressReport, step, loss, accuracy)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BucketTrace, ready_ns, start_ns, finish_ns)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTrace, step, overlapped, after_evaluation, begin_ns,
                                   forward_end_ns, layer_end_ns, marked_ns, done_ns, end_ns,
                                   buckets)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FinishedReport, accuracy, parameters_equal)

namespace {

const char* EventName(const JoinedReport&) { return "joined"; }
const char* EventName(const ProgressReport&) { return "progress"; }
const char* EventName(const StepTrace&) { return "trace"; }
const char* EventName(const FinishedReport&) { return "finished"; }

}  // namespace

std::string FormatReport(const Report& report) {
  nlohmann::json line;
  std::visit(
      [&line](const auto& event) {
        line = event;
        line["event"] = EventName(event);
      },
      report);
  return line.dump() + "\n";
}

absl::StatusOr<Report> ParseReport(absl::string_view line) {
  // The JSON library speaks in exceptions; they end here.
  try {
    const nlohmann::json json = nlohmann::json::parse(line.begin(), line.end());
    const std::string event = json.at("event");
    if (event == "joined") return Report(json.get<JoinedReport>());
    if (event == "progress") return Report(json.get<ProgressReport>());
    if (event == "trace") return Report(json.get<StepTrace>());
    if (event == "finished") return Report(json.get<FinishedReport>());
    return absl::InvalidArgumentError(absl::StrCat("unknown event '", event, "'"));
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("not a report: ", error.what()));
  }
}

}  // namespace gradsync::examples
