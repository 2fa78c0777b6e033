#include "tools/bench/temporary_directory.h"

#include <errno.h>
#include <stdlib.h>

#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace gradsync::bench {

absl::StatusOr<TemporaryDirectory> TemporaryDirectory::Create(absl::string_view parent) {
  std::string path = absl::StrCat(parent, "/gradsync-bench-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) return absl::ErrnoToStatus(errno, path);
  return TemporaryDirectory(std::move(path));
}

absl::StatusOr<TemporaryDirectory> TemporaryDirectory::Create() {
  const char* const parent = std::getenv("TMPDIR");
  return Create(parent != nullptr && *parent != '\0' ? parent : "/tmp");
}

TemporaryDirectory::~TemporaryDirectory() {
  if (path_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace gradsync::bench
