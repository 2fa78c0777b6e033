// Runs a part of a test in a child process.

#ifndef TESTS_KIT_IN_CHILD_H_
#define TESTS_KIT_IN_CHILD_H_

#include <sys/wait.h>
#include <unistd.h>

namespace gradsync {

// Forks, and waits for the child. Returns the child's exit status, which is what `body` returns
// there; -1 if the child ends otherwise, or cannot be made.
template <typename Body>
int InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace gradsync

#endif  // TESTS_KIT_IN_CHILD_H_
