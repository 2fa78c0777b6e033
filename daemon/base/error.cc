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

// The size of the character at the front of `text`, which is not empty. 0: it is no UTF-8.
std::size_t CharacterBytes(absl::string_view text) {
  const auto byte = [text](std::size_t at) -> unsigned {
    return static_cast<unsigned char>(text[at]);
  };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  std::size_t size = 2;
  if (first >= 0xE0) size = 3;
  if (first >= 0xF0) size = 4;
  if (text.size() < size) return 0;
  // Not a longer form than needed, no surrogate, and at most U+10FFFF (RFC 3629, section 4).
  unsigned least = 0x80, most = 0xBF;
  if (first == 0xE0) least = 0xA0;
  if (first == 0xED) most = 0x9F;
  if (first == 0xF0) least = 0x90;
  if (first == 0xF4) most = 0x8F;
  if (byte(1) < least || byte(1) > most) return 0;
  for (std::size_t at = 2; at < size; ++at) {
    if (byte(at) < 0x80 || byte(at) > 0xBF) return 0;
  }
  return size;
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

std::string ValidText(absl::string_view text, std::size_t most) {
  std::string valid;
  while (!text.empty()) {
    const std::size_t character = CharacterBytes(text);
    const std::size_t taken = character == 0 ? 1 : character;
    if (taken > most - valid.size()) break;
    if (character == 0) {
      valid.push_back('?');
    } else {
      valid.append(text.data(), character);
    }
    text.remove_prefix(taken);
  }
  return valid;
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
