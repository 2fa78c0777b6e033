// Answers for people: short, aligned text that ends with a line feed. One source file each.

#ifndef TOOLS_GRADSYNCCTL_RENDER_H_
#define TOOLS_GRADSYNCCTL_RENDER_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "gradsync/v1/introspection.pb.h"
#include "tools/gradsyncctl/doctor/doctor.h"
#include "tools/gradsyncctl/health_report.h"

namespace gradsync {

// `with_ranks`: also one line for each session.
std::string RenderStatus(const v1::GetStatusResponse& status, bool with_ranks);

// The part of it about jobs that span nodes; empty if there are none.
std::string RenderNodes(const v1::GetStatusResponse& status);

// The part of it about GPUs and workers; empty if the daemon knows nothing of them.
std::string RenderGpus(const v1::GetStatusResponse& status);

std::string RenderStats(const v1::GetStatsResponse& stats);

// One picture for each step of `timeline`.
std::string RenderTimeline(absl::string_view job, absl::string_view layout,
                           const v1::GetTimelineResponse& timeline);

std::string RenderHealth(const HealthReport& report, const std::vector<ServiceHealth>& services,
                         const v1::GetStatusResponse& status);

std::string RenderDoctor(const std::vector<Finding>& findings);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_RENDER_H_
