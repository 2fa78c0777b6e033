// A folder of the bench's own.

#ifndef TOOLS_BENCH_TEMPORARY_DIRECTORY_H_
#define TOOLS_BENCH_TEMPORARY_DIRECTORY_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync::bench {

// Move-only; removed with everything in it by the destructor.
class TemporaryDirectory {
 public:
  // A new folder of mode 0700 in `parent`.
  static absl::StatusOr<TemporaryDirectory> Create(absl::string_view parent);
  // In $TMPDIR, or /tmp.
  static absl::StatusOr<TemporaryDirectory> Create();

  TemporaryDirectory() = default;
  TemporaryDirectory(TemporaryDirectory&& other) noexcept { path_.swap(other.path_); }
  TemporaryDirectory& operator=(TemporaryDirectory&& other) noexcept {
    path_.swap(other.path_);
    return *this;
  }
  ~TemporaryDirectory();

  const std::string& path() const { return path_; }

 private:
  explicit TemporaryDirectory(std::string path) : path_(std::move(path)) {}

  std::string path_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_TEMPORARY_DIRECTORY_H_
