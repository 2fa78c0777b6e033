#include "daemon/base/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_split.h"

namespace gradsync::daemon {
namespace {

// reason NUL (field NUL value NUL)*
constexpr char kPayload[] = "gradsync/error";

void AppendWord(absl::string_view word, std::string* out) {
  absl::StrAppend(out, word.substr(0, word.find('\0')));
  out->push_back('\0');
}

}  // namespace

std::string ErrorDetails::Value(FieldName name) const {
  for (const auto& [field, value] : fields) {
    if (field == name) return value;
  }
  return "";
}

absl::Status MakeError(absl::StatusCode code, Reason reason, absl::string_view message,
                       std::initializer_list<ErrorField> fields) {
  ErrorDetails details;
  details.reason = std::string(reason.text());
  for (const ErrorField& field : fields) {
    details.fields.emplace_back(field.name.text(), field.value);
  }
  return MakeError(code, details, message);
}

absl::Status MakeError(absl::StatusCode code, const ErrorDetails& details,
                       absl::string_view message) {
  absl::Status status(code, message);
  std::string payload;
  AppendWord(details.reason, &payload);
  for (const auto& [name, value] : details.fields) {
    AppendWord(name, &payload);
    AppendWord(value, &payload);
  }
  status.SetPayload(kPayload, absl::Cord(payload));
  return status;
}

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return details;
  const std::string flat(*payload);
  const std::vector<absl::string_view> words = absl::StrSplit(flat, '\0');
  if (words.empty()) return details;
  details.reason = std::string(words[0]);
  for (std::size_t i = 1; i + 1 < words.size(); i += 2) {
    details.fields.emplace_back(words[i], words[i + 1]);
  }
  return details;
}

}  // namespace gradsync::daemon
