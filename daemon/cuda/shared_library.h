// A shared library that is opened at run time.

#ifndef DAEMON_CUDA_SHARED_LIBRARY_H_
#define DAEMON_CUDA_SHARED_LIBRARY_H_

#include <string>

#include "absl/status/statusor.h"

namespace gradsync::daemon {

// Thread-safe. The library stays open until the process ends, since drivers leave threads and exit
// handlers behind.
class SharedLibrary {
 public:
  // `path`: as for dlopen. With a slash it is a file, without one a name that the loader looks up.
  // NOT_FOUND with the loader's reason.
  static absl::StatusOr<SharedLibrary> Open(const std::string& path);

  // Null if the library lacks the function.
  void* Find(const char* function) const;

  const std::string& path() const { return path_; }

 private:
  SharedLibrary(void* handle, std::string path);

  void* handle_;
  std::string path_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_SHARED_LIBRARY_H_
