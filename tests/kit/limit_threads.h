// For a child process of a test: a limit on its threads.

#ifndef TESTS_KIT_LIMIT_THREADS_H_
#define TESTS_KIT_LIMIT_THREADS_H_

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>

namespace gradsync {

// From now on this process's user may have `threads` threads. The limit does not hold for root, so
// root becomes `user`, which no other test program may be: the threads of all its processes count.
// That fails in Bazel's sandbox, so these tests have the tag no-sandbox.
inline void LimitThreads(rlim_t threads, uid_t user) {
  const rlimit limit{threads, threads};
  if (setrlimit(RLIMIT_NPROC, &limit) != 0) std::abort();
  if (geteuid() == 0 && setresuid(user, user, user) != 0) std::abort();
}

}  // namespace gradsync

#endif  // TESTS_KIT_LIMIT_THREADS_H_
