// A pipe to or from a child process.

#ifndef TESTS_KIT_PIPE_H_
#define TESTS_KIT_PIPE_H_

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tests/kit/child_process.h"

namespace gradsync {

struct Pipe {
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      std::perror("pipe2");
      std::abort();
    }
    read = Descriptor(ends[0]);
    write = Descriptor(ends[1]);
  }
  Descriptor read, write;
};

}  // namespace gradsync

#endif  // TESTS_KIT_PIPE_H_
