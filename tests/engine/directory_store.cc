#include "tests/engine/directory_store.h"

#include <poll.h>
#include <sys/inotify.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "daemon/base/clock.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

std::optional<std::string> Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

}  // namespace

DirectoryStore::DirectoryStore(std::string directory) : directory_(std::move(directory)) {}

std::string DirectoryStore::Path(const std::string& key) const {
  return absl::StrCat(directory_, "/", absl::StrReplaceAll(key, {{"/", "_"}}));
}

absl::Status DirectoryStore::Set(const std::string& key, const std::string& value) {
  const std::string path = Path(key);
  const std::string partial = absl::StrCat(path, ".partial");
  std::ofstream(partial, std::ios::binary) << value;
  if (std::rename(partial.c_str(), path.c_str()) != 0) return absl::InternalError(path);
  return absl::OkStatus();
}

absl::StatusOr<std::string> DirectoryStore::Get(const std::string& key, absl::Duration timeout) {
  const UniqueFd watch(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (inotify_add_watch(watch.get(), directory_.c_str(), IN_MOVED_TO) < 0) {
    return absl::InternalError(directory_);
  }
  const auto end_ns =
      static_cast<std::int64_t>(MonotonicNowNs()) + absl::ToInt64Nanoseconds(timeout);
  for (;;) {
    if (std::optional<std::string> contents = Contents(Path(key))) return *std::move(contents);
    const std::int64_t left_ms = (end_ns - static_cast<std::int64_t>(MonotonicNowNs())) / 1'000'000;
    if (left_ms <= 0) return absl::DeadlineExceededError(absl::StrCat("nobody has set ", key));
    pollfd changed = {watch.get(), POLLIN, 0};
    poll(&changed, 1, static_cast<int>(std::min<std::int64_t>(left_ms, 1'000'000)));
    char events[4096];
    while (read(watch.get(), events, sizeof(events)) > 0) {
    }
  }
}

}  // namespace gradsync::daemon
