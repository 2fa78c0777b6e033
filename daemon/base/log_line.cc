#include "daemon/base/log_line.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace gradsync::daemon {
namespace {

std::string Timestamp(std::int64_t unix_ns) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::FromUnixNanos(unix_ns),
                          absl::UTCTimeZone());
}

bool IsSecret(std::string_view key) {
  const absl::string_view name(key.data(), key.size());
  return absl::StrContains(name, "token") || absl::StrContains(name, "nonce");
}

std::string Cut(std::string_view text) {
  if (text.size() <= kMaxLogValueBytes) return std::string(text);
  std::size_t end = kMaxLogValueBytes;
  // Do not cut within a character. Continuation bytes are 10xxxxxx.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "...";
}

nlohmann::ordered_json ToJson(const LogField& field) {
  if (IsSecret(field.key)) return "[redacted]";
  switch (field.value.kind()) {
    case LogValue::Kind::kSigned:
      return field.value.signed_value();
    case LogValue::Kind::kUnsigned:
      return field.value.unsigned_value();
    case LogValue::Kind::kBool:
      return field.value.bool_value();
    case LogValue::Kind::kDouble:
      // JSON has no infinity and no NaN, so these become strings.
      if (!std::isfinite(field.value.double_value())) {
        return absl::StrCat(field.value.double_value());
      }
      return field.value.double_value();
    case LogValue::Kind::kUser:
      return field.value.user().uid;
    case LogValue::Kind::kText:
      break;
  }
  return Cut(field.value.text());
}

// The pod that a field names besides its value; empty: none.
std::string PodOf(const LogField& field) {
  return field.value.kind() == LogValue::Kind::kUser ? field.value.user().pod.Text() : "";
}

// True if a terminal would obey a character: DEL, and U+0080 to U+009F. JSON escapes only lower
// ones.
bool HasTerminalControl(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x7F') return true;
    if (text[i] == '\xC2' && i + 1 < text.size() &&
        static_cast<unsigned char>(text[i + 1]) < 0xA0) {
      return true;
    }
  }
  return false;
}

std::string Dump(const nlohmann::ordered_json& json) {
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  std::string text = json.dump(-1, ' ', /*ensure_ascii=*/false, kReplace);
  if (HasTerminalControl(text)) text = json.dump(-1, ' ', /*ensure_ascii=*/true, kReplace);
  return text;
}

// `dumped` is a JSON value. Removes the quotes of a string that is unambiguous without them.
std::string Unquote(std::string dumped) {
  const bool plain =
      dumped.size() > 2 && std::all_of(dumped.begin() + 1, dumped.end() - 1, [](unsigned char c) {
        return c > ' ' && c != '"' && c != '\\' && c != '=';
      });
  if (dumped.front() != '"' || !plain) return dumped;
  return dumped.substr(1, dumped.size() - 2);
}

// A message is a constant. If it is not, it still stays on its line.
std::string MessageText(std::string_view message) {
  const std::string quoted = Dump(Cut(message));
  return quoted.substr(1, quoted.size() - 2);
}

}  // namespace

const char* LogLevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "DEBUG";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      break;
  }
  return "ERROR";
}

std::string FormatLogLine(LogFormat format, std::int64_t unix_ns, LogLevel level,
                          std::string_view message, absl::Span<const LogField> fields) {
  if (format == LogFormat::kJson) {
    nlohmann::ordered_json line = {{"time", Timestamp(unix_ns)},
                                   {"level", absl::AsciiStrToLower(LogLevelName(level))},
                                   {"message", Cut(message)}};
    for (const LogField& field : fields) {
      line[std::string(field.key)] = ToJson(field);
      if (std::string pod = PodOf(field); !pod.empty()) line["pod"] = std::move(pod);
    }
    return Dump(line);
  }
  std::string line =
      absl::StrCat(Timestamp(unix_ns), " ", LogLevelName(level), " ", MessageText(message));
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", std::string(field.key), "=", Unquote(Dump(ToJson(field))));
    if (const std::string pod = PodOf(field); !pod.empty()) absl::StrAppend(&line, " pod=", pod);
  }
  return line;
}

}  // namespace gradsync::daemon
