// Answers for people: aligned text that ends with a line feed. Each has its own source file.
// Length::kShort bounds an answer to about kMostLines lines.

#ifndef TOOLS_GRADSYNCCTL_RENDER_H_
#define TOOLS_GRADSYNCCTL_RENDER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gradsync/v1/introspection.pb.h"
#include "tools/gradsyncctl/doctor/doctor.h"
#include "tools/gradsyncctl/health_report.h"
#include "tools/gradsyncctl/short_answer.h"

namespace gradsync {

// `with_ranks`: also one line for each session.
std::string RenderStatus(const v1::GetStatusResponse& status, bool with_ranks, Length length);

// The tables of the status about jobs that span nodes.
std::vector<Section> NodeSections(const v1::GetStatusResponse& status);

// The tables of the status about GPUs and workers; none if the daemon knows nothing of GPUs.
std::vector<Section> GpuSections(const v1::GetStatusResponse& status);

// `warnings` are added at the end.
std::string RenderStats(const v1::GetStatsResponse& stats, const std::vector<std::string>& warnings,
                        Length length);

// One picture for each step of `timeline`. If that is too much for a short answer: a table of the
// steps, and a picture of the worst.
std::string RenderTimeline(absl::string_view job, absl::string_view layout,
                           const v1::GetTimelineResponse& timeline, Length length);

// `status`: an error if the daemon does not tell its state.
std::string RenderHealth(const HealthReport& report, const std::vector<ServiceHealth>& services,
                         const absl::StatusOr<v1::GetStatusResponse>& status, Length length);

std::string RenderDoctor(const std::vector<Finding>& findings);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_RENDER_H_
