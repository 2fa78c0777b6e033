// For a child process of a test: a limit on its threads.

#ifndef TESTS_KIT_LIMIT_THREADS_H_
#define TESTS_KIT_LIMIT_THREADS_H_

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>

namespace gradsync {

// From now on this process's user may have `threads` threads. The limit does not hold for root, so
// root becomes another user. That fails in Bazel's sandbox, so these tests have the tag no-sandbox.
inline void LimitThreads(rlim_t threads) {
  constexpr uid_t kUser = 34568;
  const rlimit limit{threads, threads};
  if (setrlimit(RLIMIT_NPROC, &limit) != 0) std::abort();
  if (geteuid() == 0 && setresuid(kUser, kUser, kUser) != 0) std::abort();
}

}  // namespace gradsync

#endif  // TESTS_KIT_LIMIT_THREADS_H_
