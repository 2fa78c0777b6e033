// Files of the fake machine, which processes of any user can open.

#ifndef TESTS_FAKES_MACHINE_SHARED_FILE_H_
#define TESTS_FAKES_MACHINE_SHARED_FILE_H_

#include <fcntl.h>
#include <sys/stat.h>

#include <string>

#include "daemon/base/unique_fd.h"

namespace gradsync::fakes {

// Opens the file. If the flags have O_CREAT, makes it accessible to all users, whatever the umask.
inline daemon::UniqueFd OpenShared(const std::string& path, int flags) {
  constexpr mode_t kAll = 0666;
  daemon::UniqueFd fd(open(path.c_str(), flags | O_CLOEXEC, kAll));
  // Fails for files of other users, but those have the right mode already.
  if (fd.valid() && (flags & O_CREAT) != 0) static_cast<void>(fchmod(fd.get(), kAll));
  return fd;
}

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_SHARED_FILE_H_
