#include "tools/bench/cuda_synchronizations.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::bench {

absl::StatusOr<CudaSynchronizations> CudaSynchronizations::Count(const std::string& cuda_library) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = self.parent_path() / "libcounting_cuda_driver.so";
  setenv("GRADSYNC_COUNTED_CUDA_LIBRARY", cuda_library.c_str(), 1);
  setenv("GRADSYNC_CUDA_LIBRARY", path.c_str(), 1);
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::NotFoundError(absl::StrCat("dlopen: ", dlerror()));
  CudaSynchronizations synchronizations;
  synchronizations.so_far_ =
      reinterpret_cast<std::uint64_t (*)()>(dlsym(library, "gradsync_cuda_synchronizations"));
  if (synchronizations.so_far_ == nullptr) {
    return absl::NotFoundError(absl::StrCat(path, " has no counter"));
  }
  return synchronizations;
}

}  // namespace gradsync::bench
