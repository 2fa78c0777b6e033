// A shared library that is opened at run time.

#ifndef DAEMON_CUDA_SHARED_LIBRARY_H_
#define DAEMON_CUDA_SHARED_LIBRARY_H_

#include <string>

#include "absl/status/statusor.h"

namespace gradsync {

// Stays open until the process ends: drivers leave threads and exit handlers behind. Thread-safe.
class SharedLibrary {
 public:
  // `path` as dlopen takes it: with a slash a file, without one a name that the loader looks for.
  // NOT_FOUND with the loader's reason.
  static absl::StatusOr<SharedLibrary> Open(const std::string& path);

  // Null if the library does not have it.
  void* Find(const char* function) const;

  const std::string& path() const { return path_; }

 private:
  SharedLibrary(void* handle, std::string path);

  void* handle_;
  std::string path_;
};

}  // namespace gradsync

#endif  // DAEMON_CUDA_SHARED_LIBRARY_H_
