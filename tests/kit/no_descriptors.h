// For tests of what a process does that has no descriptor left.

#ifndef TESTS_KIT_NO_DESCRIPTORS_H_
#define TESTS_KIT_NO_DESCRIPTORS_H_

#include <fcntl.h>
#include <sys/resource.h>

#include <utility>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "gtest/gtest.h"

namespace gradsync {

// Uses up the process's descriptors while it exists.
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit few{512, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (;;) {
      daemon::UniqueFd one(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!one.valid()) return;
      used_.push_back(std::move(one));
    }
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
  std::vector<daemon::UniqueFd> used_;
};

}  // namespace gradsync

#endif  // TESTS_KIT_NO_DESCRIPTORS_H_
