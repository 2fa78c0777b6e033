// Files of the fake machine, which processes of any user open.

#ifndef TESTS_FAKES_MACHINE_SHARED_FILE_H_
#define TESTS_FAKES_MACHINE_SHARED_FILE_H_

#include <fcntl.h>
#include <sys/stat.h>

#include <string>

#include "daemon/base/unique_fd.h"

namespace gradsync::fakes {

// Creates it if flags say so, for everybody whatever the umask.
inline UniqueFd OpenShared(const std::string& path, int flags) {
  constexpr mode_t kAll = 0666;
  UniqueFd fd(open(path.c_str(), flags | O_CLOEXEC, kAll));
  // Fails for files of other users, which are right already.
  if (fd.valid() && (flags & O_CREAT) != 0) static_cast<void>(fchmod(fd.get(), kAll));
  return fd;
}

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_SHARED_FILE_H_
