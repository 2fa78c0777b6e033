#include "daemon/job/job_key.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

std::string JobKey::Text() const {
  std::string text = absl::StrCat(uid);
  // The hash comes before the id, because the id may contain any character.
  if (!token_hash.empty()) {
    absl::StrAppend(&text, "+", absl::BytesToHexString(token_hash));
  }
  return absl::StrCat(text, "/", job_id);
}

}  // namespace gradsync::daemon
