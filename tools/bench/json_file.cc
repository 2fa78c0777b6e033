#include "tools/bench/json_file.h"

#include <errno.h>

#include "absl/strings/str_cat.h"

namespace gradsync::bench {

absl::StatusOr<JsonFile> JsonFile::Open(const std::string& path) {
  JsonFile file;
  if (path.empty()) return file;
  file.path_ = path;
  file.file_.open(path);
  if (!file.file_.is_open()) return absl::ErrnoToStatus(errno, absl::StrCat("--json ", path));
  return file;
}

absl::Status JsonFile::Write(const nlohmann::json& document) {
  if (path_.empty()) return absl::OkStatus();
  file_ << document.dump(2) << '\n';
  file_.close();
  return file_.fail() ? absl::ErrnoToStatus(errno, absl::StrCat("--json ", path_))
                      : absl::OkStatus();
}

}  // namespace gradsync::bench
