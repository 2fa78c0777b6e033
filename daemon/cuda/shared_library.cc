#include "daemon/cuda/shared_library.h"

#include <dlfcn.h>

#include <utility>

#include "absl/status/status.h"

namespace gradsync::daemon {

absl::StatusOr<SharedLibrary> SharedLibrary::Open(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    return absl::NotFoundError(why != nullptr ? why : path);
  }
  return SharedLibrary(handle, path);
}

SharedLibrary::SharedLibrary(void* handle, std::string path)
    : handle_(handle), path_(std::move(path)) {}

void* SharedLibrary::Find(const char* function) const { return dlsym(handle_, function); }

}  // namespace gradsync::daemon
