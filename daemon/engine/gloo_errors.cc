#include "daemon/engine/gloo_errors.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gloo/common/error.h"

namespace gradsync::daemon {
namespace {

// "[/build/gloo/transport/tcp/pair.cc:598] Connection closed" -> "Connection closed".
absl::string_view WithoutSource(absl::string_view text) {
  const std::size_t end = text.find("] ");
  return !text.empty() && text[0] == '[' && end != absl::string_view::npos ? text.substr(end + 2)
                                                                           : text;
}

}  // namespace

absl::Status StatusOfGloo(const std::exception& error) {
  const std::string message = absl::StrCat("Gloo: ", WithoutSource(error.what()));
  if (dynamic_cast<const gloo::IoException*>(&error) != nullptr) {
    return absl::UnavailableError(message);
  }
  return absl::InternalError(message);
}

}  // namespace gradsync::daemon
