#include "daemon/base/logging.h"

#include <fcntl.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "daemon/base/log_limiter.h"
#include "daemon/base/log_line.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {
namespace {

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      break;
  }
  return spdlog::level::err;
}

// The prefixes SD_DEBUG to SD_ERR of sd-daemon.h: journald reads the level from them and removes
// them.
const char* JournalPrefix(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "<7>";
    case LogLevel::kInfo:
      return "<6>";
    case LogLevel::kWarning:
      return "<4>";
    case LogLevel::kError:
      break;
  }
  return "<3>";
}

// The user whom a line is about. Nobody if it has no field `uid`.
LogSubject UserOf(absl::Span<const LogField> fields) {
  for (const LogField& field : fields) {
    if (field.key != "uid") continue;
    const bool is_user = field.value.kind() == LogValue::Kind::kUser;
    const std::uint64_t uid = is_user ? field.value.user().uid : field.value.unsigned_value();
    return {"uid", absl::StrCat(uid)};
  }
  return {};
}

// The address that a line is about.
LogSubject AddressOf(absl::Span<const LogField> fields) {
  for (const LogField& field : fields) {
    if (field.key == "address") return {"address", std::string(field.value.text())};
  }
  return {};
}

// JOURNAL_STREAM names the device and inode of the stream that journald reads: systemd.exec(5).
bool StderrIsJournal() {
  const char* stream = std::getenv("JOURNAL_STREAM");
  struct stat status;
  if (stream == nullptr || fstat(STDERR_FILENO, &status) != 0) return false;
  return absl::StrCat(status.st_dev, ":", status.st_ino) == stream;
}

absl::Status CannotAppend(const std::string& file, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("log_file \"", file, "\" cannot be appended to: ", std::string(why)));
}

// spdlog opens and appends to the file, serializes the lines and reports a full disk. It writes our
// text unchanged.
absl::StatusOr<std::unique_ptr<spdlog::logger>> MakeLogger(const LogOptions& options) {
  // Without this check spdlog would create the missing folders, misspelled ones too.
  if (absl::Status status = CheckLogFile(options.file); !status.ok()) return status;
  spdlog::sink_ptr sink;
  if (options.file.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  } else {
    try {
      sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file);
    } catch (const spdlog::spdlog_ex& error) {
      return CannotAppend(options.file, error.what());
    }
  }
  auto logger = std::make_unique<spdlog::logger>("gradsyncd", std::move(sink));
  logger->set_pattern("%v");
  logger->set_level(ToSpdlog(options.level));
  logger->flush_on(spdlog::level::trace);
  return logger;
}

class Logging {
 public:
  // Never destroyed: threads may log while the process exits.
  static Logging& Get() {
    static Logging* const logging = new Logging;
    return *logging;
  }

  absl::Status Init(const LogOptions& options) {
    auto logger = MakeLogger(options);
    if (!logger.ok()) return logger.status();
    MutexLock lock(&mutex_);
    format_ = options.format;
    to_journal_ = options.file.empty() && StderrIsJournal();
    limiter_ = std::make_unique<LogLimiter>(
        options.clock != nullptr ? options.clock : &monotonic_clock_, kLimitedLinesPerSecond);
    logger_ = *std::move(logger);
    return absl::OkStatus();
  }

  // `subject`: whose line it is. Null: the line is not limited.
  void Write(LogLevel level, std::string_view message, absl::Span<const LogField> fields,
             LogSubject (*subject)(absl::Span<const LogField>)) {
    MutexLock lock(&mutex_);
    if (!logger_->should_log(ToSpdlog(level))) return;
    WriteSuppressedLocked(limiter_->TakeSuppressed());
    if (subject != nullptr && !limiter_->Allow(message, subject(fields))) return;
    WriteLocked(level, message, fields);
  }

  void Flush() {
    MutexLock lock(&mutex_);
    WriteSuppressedLocked(limiter_->TakeAllSuppressed());
    logger_->flush();
  }

 private:
  Logging() : limiter_(std::make_unique<LogLimiter>(&monotonic_clock_, kLimitedLinesPerSecond)) {
    auto logger = MakeLogger(LogOptions());
    logger_ = *std::move(logger);  // stderr: nothing to open
  }

  void WriteLocked(LogLevel level, std::string_view message, absl::Span<const LogField> fields)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::string line =
        absl::StrCat(to_journal_ ? JournalPrefix(level) : "",
                     FormatLogLine(format_, absl::GetCurrentTimeNanos(), level, message, fields));
    logger_->log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
  }

  void WriteSuppressedLocked(const std::vector<LogLimiter::Suppressed>& suppressed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const LogLimiter::Suppressed& lines : suppressed) {
      std::vector<LogField> fields = {{"message", lines.message}, {"count", lines.count}};
      const LogSubject& subject = lines.subject;
      if (!subject.value.empty()) fields.push_back({subject.field, subject.value});
      WriteLocked(LogLevel::kWarning, "suppressed lines", fields);
    }
  }

  const MonotonicClock monotonic_clock_;

  Mutex mutex_;
  LogFormat format_ ABSL_GUARDED_BY(mutex_) = LogFormat::kText;
  bool to_journal_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<LogLimiter> limiter_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<spdlog::logger> logger_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::Status CheckLogFile(const std::string& file) {
  if (file.empty()) return absl::OkStatus();
  const std::string folder = file.substr(0, file.rfind('/') + 1);
  const char* const where = folder.empty() ? "." : folder.c_str();
  if (access(where, F_OK) != 0) {
    return CannotAppend(file, absl::StrCat("\"", folder, "\" does not exist"));
  }
  struct stat existing;
  if (stat(file.c_str(), &existing) == 0 && S_ISDIR(existing.st_mode)) {
    return CannotAppend(file, std::strerror(EISDIR));
  }
  // AT_EACCESS: with this process's capabilities, too.
  const auto may = [](const char* path, int mode) {
    return faccessat(AT_FDCWD, path, mode, AT_EACCESS) == 0;
  };
  const bool allowed = may(file.c_str(), W_OK) || (errno == ENOENT && may(where, W_OK | X_OK));
  return allowed ? absl::OkStatus() : CannotAppend(file, std::strerror(errno));
}

absl::Status InitLogging(const LogOptions& options) { return Logging::Get().Init(options); }

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  Logging::Get().Write(level, message, fields, nullptr);
}

void LogLimited(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  Logging::Get().Write(level, message, fields, UserOf);
}

void LogLimitedByAddress(LogLevel level, std::string_view message,
                         std::initializer_list<LogField> fields) {
  Logging::Get().Write(level, message, fields, AddressOf);
}

void FlushLogging() { Logging::Get().Flush(); }

}  // namespace gradsync::daemon
