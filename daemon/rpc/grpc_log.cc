#include "daemon/rpc/grpc_log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <string>

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

std::string Place(absl::string_view file, int line) {
  file.remove_prefix(file.rfind('/') + 1);  // none: npos + 1 is 0
  return absl::StrCat(file, ":", line);
}

void WriteOfGrpc(gpr_log_func_args* said) {
  LogLimited(LevelOf(said->severity), "gRPC",
             {{"says", said->message}, {"at", Place(said->file, said->line)}});
}

// Most messages are about what a client has sent, such as text that is no UTF-8. After a fatal one
// the process ends.
void WriteOfProtobuf(google::protobuf::LogLevel level, const char* file, int line,
                     const std::string& message) {
  const bool fatal = level == google::protobuf::LOGLEVEL_FATAL;
  LogLimited(fatal ? LogLevel::kError : LogLevel::kWarning, "Protocol Buffers",
             {{"says", message}, {"at", Place(file, line)}});
}

}  // namespace

void LogWhatGrpcSays() {
  gpr_set_log_function(WriteOfGrpc);
  google::protobuf::SetLogHandler(WriteOfProtobuf);
}

}  // namespace gradsync::daemon
