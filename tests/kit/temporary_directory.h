// A new directory. The destructor removes it with its contents. It is below /tmp because
// $TEST_TMPDIR is too long for the path of a socket.

#ifndef TESTS_KIT_TEMPORARY_DIRECTORY_H_
#define TESTS_KIT_TEMPORARY_DIRECTORY_H_

#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <string>

namespace gradsync {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    char name[] = "/tmp/gradsync_test.XXXXXX";
    if (mkdtemp(name) == nullptr) {
      std::perror("mkdtemp");
      std::abort();
    }
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace gradsync

#endif  // TESTS_KIT_TEMPORARY_DIRECTORY_H_
