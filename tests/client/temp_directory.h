// A directory for sockets, gone with the object. Below /tmp: $TEST_TMPDIR is too long for a
// socket's path.

#ifndef TESTS_CLIENT_TEMP_DIRECTORY_H_
#define TESTS_CLIENT_TEMP_DIRECTORY_H_

#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <string>

namespace gradsync {

class TempDirectory {
 public:
  TempDirectory() {
    char name[] = "/tmp/gradsync_test.XXXXXX";
    if (mkdtemp(name) == nullptr) {
      std::perror("mkdtemp");
      std::abort();
    }
    path_ = name;
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace gradsync

#endif  // TESTS_CLIENT_TEMP_DIRECTORY_H_
