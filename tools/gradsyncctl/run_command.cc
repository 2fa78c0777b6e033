#include "tools/gradsyncctl/run_command.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/version.h"
#include "proto/gradsync/limits.h"
#include "tools/gradsyncctl/arguments.h"
#include "tools/gradsyncctl/daemon_connection.h"
#include "tools/gradsyncctl/doctor/doctor.h"
#include "tools/gradsyncctl/health_report.h"
#include "tools/gradsyncctl/help.h"
#include "tools/gradsyncctl/json.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr const char* kServices[] = {"", "gradsync.v1.GradientSync", "gradsync.v1.Introspection"};

Length LengthOf(const CtlArguments& arguments) {
  return arguments.all ? Length::kFull : Length::kShort;
}

// What a command prints and the exit status it asks for.
struct Answer {
  std::string text;
  HealthCode code = HealthCode::kOk;
};

// "no job x; the jobs are a, b".
absl::Status NoSuch(absl::string_view what, const std::string& name,
                    const std::vector<std::string>& known) {
  return absl::NotFoundError(
      absl::StrCat("no ", what, " ", name,
                   known.empty() ? absl::StrCat("; there are no ", what, "s")
                                 : absl::StrCat("; there is: ", absl::StrJoin(known, ", "))));
}

void AddOnce(const std::string& name, std::vector<std::string>* names) {
  if (std::find(names->begin(), names->end(), name) == names->end()) names->push_back(name);
}

// Each once: generations of a job share its id.
std::vector<std::string> JobIds(const v1::GetStatusResponse& status) {
  std::vector<std::string> ids;
  for (const v1::JobStatus& job : status.jobs()) AddOnce(job.job_id(), &ids);
  return ids;
}

// OK unless this node has only ranks of the job: then the coordinator has its statistics and
// timelines.
absl::Status CheckCoordinatedHere(const v1::GetStatusResponse& status) {
  if (!status.jobs().empty() || status.remote_jobs().empty()) return absl::OkStatus();
  const v1::RemoteJobStatus& job = status.remote_jobs(0);
  return absl::FailedPreconditionError(
      absl::StrCat("job ", job.job_id(), " is coordinated by the daemon of node ",
                   job.node_name().empty() ? "(unknown)" : job.node_name(), " at ",
                   job.coordinator(), ": ask there"));
}

// The status of `job`, or of all jobs if it is empty. NOT_FOUND: no such job, and which there are.
absl::StatusOr<v1::GetStatusResponse> AskStatus(const std::string& job,
                                                DaemonConnection* connection) {
  absl::StatusOr<v1::GetStatusResponse> status = connection->GetStatus(job);
  if (!status.ok() || job.empty() || !status->jobs().empty() || !status->remote_jobs().empty()) {
    return status;
  }
  absl::StatusOr<v1::GetStatusResponse> all = connection->GetStatus("");
  if (!all.ok()) return all;
  std::vector<std::string> ids = JobIds(*all);
  for (const v1::RemoteJobStatus& remote : all->remote_jobs()) AddOnce(remote.job_id(), &ids);
  return NoSuch("job", job, ids);
}

absl::StatusOr<Answer> AnswerStatus(const CtlArguments& arguments, DaemonConnection* connection) {
  absl::StatusOr<v1::GetStatusResponse> status = AskStatus(arguments.job, connection);
  if (!status.ok()) return std::move(status).status();
  return Answer{arguments.json ? MessageToJson(*status)
                               : RenderStatus(*status, !arguments.job.empty(), LengthOf(arguments)),
                JudgeStatus(*status).code};
}

absl::StatusOr<Answer> AnswerStats(const CtlArguments& arguments, DaemonConnection* connection) {
  absl::StatusOr<v1::GetStatusResponse> status = AskStatus(arguments.job, connection);
  if (!status.ok()) return std::move(status).status();
  if (!arguments.job.empty()) {
    if (absl::Status here = CheckCoordinatedHere(*status); !here.ok()) return here;
  }
  absl::StatusOr<v1::GetStatsResponse> stats = connection->GetStats(arguments.job);
  if (!stats.ok()) return std::move(stats).status();
  const HealthReport report = JudgeStatus(*status);
  return Answer{arguments.json ? MessageToJson(*stats)
                               : RenderStats(*stats, report.reasons, LengthOf(arguments)),
                report.code};
}

// The only job, or the only one that lives.
absl::StatusOr<std::string> ChooseJob(const v1::GetStatusResponse& status) {
  const std::vector<std::string> ids = JobIds(status);
  if (ids.empty()) return absl::NotFoundError("the daemon has no job, so no timeline");
  if (ids.size() == 1) return ids[0];
  std::vector<std::string> live;
  for (const v1::JobStatus& job : status.jobs()) {
    if (job.state() != v1::JOB_STATE_FAILED && job.state() != v1::JOB_STATE_ENDED) {
      AddOnce(job.job_id(), &live);
    }
  }
  if (live.size() == 1) return live[0];
  return absl::FailedPreconditionError(
      absl::StrCat("there are several jobs: choose one with --job: ", absl::StrJoin(ids, ", ")));
}

// The layout that is asked for, or the only one.
absl::StatusOr<std::string> ChooseLayout(const std::string& job, const std::string& wanted,
                                         const v1::GetStatusResponse& status) {
  std::vector<std::string> names;
  for (const v1::JobStatus& candidate : status.jobs()) {
    if (candidate.job_id() != job) continue;
    for (const v1::LayoutStatus& layout : candidate.layouts()) AddOnce(layout.name(), &names);
  }
  if (!wanted.empty()) {
    if (std::find(names.begin(), names.end(), wanted) != names.end()) return wanted;
    return NoSuch("layout", wanted, names);
  }
  if (names.empty()) return absl::NotFoundError(absl::StrCat("job ", job, " has no layout yet"));
  if (names.size() == 1) return names[0];
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", job, " has several layouts: choose one with --layout: ", absl::StrJoin(names, ", ")));
}

// Keeps only the step that --step names. NOT_FOUND: the daemon no longer has it.
absl::Status KeepStep(std::uint64_t step, v1::GetTimelineResponse* timeline) {
  v1::GetTimelineResponse kept;
  for (const v1::StepTimeline& candidate : timeline->steps()) {
    if (candidate.step() == step) *kept.add_steps() = candidate;
  }
  if (kept.steps().empty() && !timeline->steps().empty()) {
    return absl::NotFoundError(absl::StrCat(
        "step ", step, " is not among the last steps that the daemon keeps: ",
        timeline->steps(0).step(), " to ", timeline->steps(timeline->steps_size() - 1).step()));
  }
  *timeline = std::move(kept);
  return absl::OkStatus();
}

absl::StatusOr<Answer> AnswerTimeline(const CtlArguments& arguments, DaemonConnection* connection) {
  absl::StatusOr<v1::GetStatusResponse> status = AskStatus(arguments.job, connection);
  if (!status.ok()) return std::move(status).status();
  if (absl::Status here = CheckCoordinatedHere(*status); !here.ok()) return here;
  const absl::StatusOr<std::string> job = ChooseJob(*status);
  if (!job.ok()) return job.status();
  const absl::StatusOr<std::string> layout = ChooseLayout(*job, arguments.layout, *status);
  if (!layout.ok()) return layout.status();
  absl::StatusOr<v1::GetTimelineResponse> timeline = connection->GetTimeline(
      *job, *layout, arguments.step != 0 ? kMaxTimelineSteps : arguments.steps);
  if (!timeline.ok()) return std::move(timeline).status();
  if (arguments.step != 0) {
    if (absl::Status kept = KeepStep(arguments.step, &*timeline); !kept.ok()) return kept;
  }
  return Answer{arguments.json ? MessageToJson(*timeline)
                               : RenderTimeline(*job, *layout, *timeline, LengthOf(arguments))};
}

absl::StatusOr<Answer> AnswerHealth(const CtlArguments& arguments, DaemonConnection* connection) {
  std::vector<ServiceHealth> services;
  for (const char* name : kServices) {
    absl::StatusOr<ServiceHealth> service = connection->CheckHealth(name);
    if (!service.ok()) return std::move(service).status();
    services.push_back(*std::move(service));
  }
  const absl::StatusOr<v1::GetStatusResponse> status = connection->GetStatus("");
  const HealthReport report = JudgeHealth(services, status);
  return Answer{arguments.json ? HealthToJson(report, arguments.socket, services)
                               : RenderHealth(report, services, status, LengthOf(arguments)),
                report.code};
}

std::string Variable(const char* name, const std::string& otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

// The gravest verdict decides.
HealthCode CodeOf(const std::vector<Finding>& findings) {
  HealthCode code = HealthCode::kOk;
  for (const Finding& finding : findings) {
    if (finding.verdict == Verdict::kOk) continue;
    code =
        std::max(code, finding.verdict == Verdict::kWarning ? HealthCode::kWarn : HealthCode::kErr);
  }
  return code;
}

absl::StatusOr<v1::GetStatusResponse> StatusAt(const CtlArguments& arguments) {
  absl::StatusOr<DaemonConnection> connection =
      DaemonConnection::Open(arguments.socket, arguments.timeout);
  if (!connection.ok()) return std::move(connection).status();
  return connection->GetStatus("");
}

Answer Examine(const CtlArguments& arguments) {
  DoctorSubject subject;
  subject.cuda_library = Variable("GRADSYNC_CUDA_LIBRARY", subject.cuda_library);
  subject.mps_pipe_directory = Variable("CUDA_MPS_PIPE_DIRECTORY", subject.mps_pipe_directory);
  subject.socket = arguments.socket;
  subject.timeout = arguments.timeout;
  subject.daemon = StatusAt(arguments);
  const std::vector<Finding> findings = Diagnose(subject);
  const HealthCode code = CodeOf(findings);
  return {arguments.json ? DoctorToJson(code, findings) : RenderDoctor(findings), code};
}

absl::StatusOr<Answer> Ask(const CtlArguments& arguments) {
  if (arguments.command == CtlCommand::kDoctor) return Examine(arguments);
  absl::StatusOr<DaemonConnection> connection =
      DaemonConnection::Open(arguments.socket, arguments.timeout);
  if (!connection.ok()) return std::move(connection).status();
  switch (arguments.command) {
    case CtlCommand::kStatus:
      return AnswerStatus(arguments, &*connection);
    case CtlCommand::kStats:
      return AnswerStats(arguments, &*connection);
    case CtlCommand::kTimeline:
      return AnswerTimeline(arguments, &*connection);
    case CtlCommand::kHealth:
      return AnswerHealth(arguments, &*connection);
    case CtlCommand::kDoctor:
    case CtlCommand::kNone:
      break;
  }
  return absl::InternalError("no command");
}

}  // namespace

int RunCommand(const std::vector<std::string>& arguments, const char* socket_variable,
               std::ostream& out, std::ostream& error) {
  constexpr int kError = static_cast<int>(HealthCode::kErr);
  const absl::StatusOr<CtlArguments> parsed = ParseArguments(arguments, socket_variable);
  if (!parsed.ok()) {
    error << "gradsyncctl: " << Printable(parsed.status().message())
          << "\nTry 'gradsyncctl --help'.\n";
    return kError;
  }
  if (parsed->help) {
    out << HelpText(parsed->command);
    return 0;
  }
  if (parsed->version) {
    out << "gradsyncctl " << daemon::kVersion << "\n";
    return 0;
  }
  const absl::StatusOr<Answer> answer = Ask(*parsed);
  if (!answer.ok()) {
    const std::string fault = Printable(answer.status().message());
    // Monitoring reads health's JSON, also when the daemon does not answer.
    if (parsed->command == CtlCommand::kHealth && parsed->json) {
      out << HealthToJson({HealthCode::kErr, {fault}}, parsed->socket, {});
    }
    error << "gradsyncctl: " << (parsed->command == CtlCommand::kHealth ? "ERR: " : "") << fault
          << "\n";
    return kError;
  }
  out << answer->text;
  return static_cast<int>(answer->code);
}

}  // namespace gradsync
