#include "daemon/rpc/grpc_log.h"

#include <grpc/support/log.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "daemon/base/logging.h"

namespace gradsync::daemon {
namespace {

LogLevel LevelOf(gpr_log_severity severity) {
  switch (severity) {
    case GPR_LOG_SEVERITY_DEBUG:
      return LogLevel::kDebug;
    case GPR_LOG_SEVERITY_INFO:
      return LogLevel::kInfo;
    case GPR_LOG_SEVERITY_ERROR:
      break;
  }
  // A mistake of a client is no error of the daemon.
  return LogLevel::kWarning;
}

void Write(gpr_log_func_args* said) {
  absl::string_view file = said->file;
  file.remove_prefix(file.rfind('/') + 1);  // none: npos + 1 is 0
  LogLimited(LevelOf(said->severity), "gRPC",
             {{"says", said->message}, {"at", absl::StrCat(file, ":", said->line)}});
}

}  // namespace

void LogWhatGrpcSays() { gpr_set_log_function(Write); }

}  // namespace gradsync::daemon
