#include "daemon/base/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace gradsync {
namespace {

// reason NUL (key NUL value NUL)*
constexpr char kPayload[] = "gradsync/error";

void AppendWord(absl::string_view word, std::string* out) {
  absl::StrAppend(out, word.substr(0, word.find('\0')));
  out->push_back('\0');
}

template <class Fields>
absl::Status Make(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                  const Fields& fields) {
  absl::Status status(code, message);
  std::string payload;
  AppendWord(reason, &payload);
  for (const auto& [key, value] : fields) {
    AppendWord(key, &payload);
    AppendWord(value, &payload);
  }
  status.SetPayload(kPayload, absl::Cord(payload));
  return status;
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       std::initializer_list<ErrorField> fields) {
  return Make(code, reason, message, fields);
}

absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       const std::vector<std::pair<std::string, std::string>>& fields) {
  return Make(code, reason, message, fields);
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

}  // namespace gradsync
