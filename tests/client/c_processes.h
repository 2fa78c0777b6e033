/* The processes of a test in C: a daemon, and the test's program once per rank:
 *
 *   PROGRAM GRADSYNCD
 *   PROGRAM --rank RANK SOCKET
 *
 * The first process has one thread.
 */

#ifndef TESTS_CLIENT_C_PROCESSES_H_
#define TESTS_CLIENT_C_PROCESSES_H_

#include <gradsync/gradsync.h>
#include <sys/types.h>

/* Of this process; -1 in the first one. */
extern int rank;

/* Says what is wrong, kills the processes that this one has started, and exits with 1. */
void Fail(int line, const char* what);

#define CHECK(condition)                          \
  do {                                            \
    if (!(condition)) Fail(__LINE__, #condition); \
  } while (0)

#define CHECK_OK(call)                                                  \
  do {                                                                  \
    gradsync_error_t* error_ = (call);                                  \
    if (error_ != NULL) Fail(__LINE__, gradsync_error_message(error_)); \
  } while (0)

/* The program's main(). `run_rank` runs in a rank's process. `run_all` runs in the first one, while
 * there is a daemon. It starts the ranks, and waits until all of them have ended. */
int RunProcesses(int argc, char** argv, int (*run_rank)(const char* socket), void (*run_all)(void));

/* The rest is for `run_all`. */

pid_t StartRank(int number);
/* Waits until some rank's process ends. Fails if the daemon ends first. */
pid_t AwaitRank(int* status);
/* The same. Fails unless the process has exited with 0. */
void AwaitSuccess(void);

#endif /* TESTS_CLIENT_C_PROCESSES_H_ */
