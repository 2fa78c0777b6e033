// A directory of one run's own, for sockets and files, that goes with the run.

#ifndef CLIENT_EXAMPLES_RUN_DIRECTORY_H_
#define CLIENT_EXAMPLES_RUN_DIRECTORY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace gradsync::examples {

// Made by mkdtemp (mode 0700); the destructor removes it with all that is in it.
class RunDirectory {
 public:
  // In $TMPDIR if a socket's path there fits into an address (107 bytes), else in /tmp. UNAVAILABLE
  // says what failed.
  static absl::StatusOr<std::unique_ptr<RunDirectory>> Create();
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  explicit RunDirectory(std::string path);

  const std::string path_;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_RUN_DIRECTORY_H_
