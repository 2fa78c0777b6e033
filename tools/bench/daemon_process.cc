#include "tools/bench/daemon_process.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace gradsync::bench {

std::string DaemonSocket(const std::string& directory) {
  return absl::StrCat(directory, "/gradsyncd.sock");
}

absl::StatusOr<std::string> FindDaemon() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path folder = self.parent_path();
  std::vector<std::string> candidates = {
      folder / "../../daemon/gradsyncd",  // bazel-bin/tools/bench
      self.string() + ".runfiles/gradsync/daemon/gradsyncd",
      folder / "gradsyncd",
  };
  const char* const path = std::getenv("PATH");
  for (absl::string_view entry : absl::StrSplit(path != nullptr ? path : "", ':')) {
    candidates.push_back(absl::StrCat(entry, "/gradsyncd"));
  }
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return absl::NotFoundError(
      absl::StrCat("no gradsyncd; give --daemon PATH (looked at ",
                   absl::StrJoin(candidates.begin(), candidates.begin() + 3, ", "), " and PATH)"));
}

absl::StatusOr<ChildProcess> StartDaemon(const std::string& program, const std::string& directory,
                                         std::uint32_t reduce_threads) {
  return ChildProcess::Start({program, absl::StrCat("--socket=", DaemonSocket(directory)),
                              absl::StrCat("--reduce_threads=", reduce_threads)},
                             directory + "/gradsyncd.log");
}

}  // namespace gradsync::bench
