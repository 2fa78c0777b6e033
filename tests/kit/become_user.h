// Turns a process of root into a process of another user.

#ifndef TESTS_KIT_BECOME_USER_H_
#define TESTS_KIT_BECOME_USER_H_

#include <grp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>

namespace gradsync {

// The user's only group has the same number. False: it cannot, and has said why.
inline bool BecomeUser(uid_t user) {
  if (setgroups(0, nullptr) != 0 || setresgid(user, user, user) != 0 ||
      setresuid(user, user, user) != 0) {
    std::perror("setresuid");
    return false;
  }
  prctl(PR_SET_DUMPABLE, 1);  // LeakSanitizer must attach to this process
  return true;
}

}  // namespace gradsync

#endif  // TESTS_KIT_BECOME_USER_H_
