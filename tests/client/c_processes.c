#define _XOPEN_SOURCE 700

#include "tests/client/c_processes.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

#define MAX_RANKS 2

int rank = -1;

/* Constant once the daemon runs. */
static char* program;
static char socket_path[64];

/* 0: none. The first one is the daemon. */
static pid_t running[1 + MAX_RANKS];

void Fail(int line, const char* what) {
  fprintf(stderr, "rank %d, line %d: %s\n", rank, line, what);
  for (int i = 0; i <= MAX_RANKS; ++i) {
    if (running[i] != 0) kill(running[i], SIGKILL);
  }
  exit(1);
}

static pid_t Spawn(char* const argv[]) {
  pid_t pid = 0;
  int error, i = 0;
  while (i <= MAX_RANKS && running[i] != 0) ++i;
  CHECK(i <= MAX_RANKS);
  error = posix_spawn(&pid, argv[0], NULL, NULL, argv, environ);
  if (error != 0) Fail(__LINE__, strerror(error));
  running[i] = pid;
  return pid;
}

pid_t StartRank(int number) {
  char option[] = "--rank";
  char text[16];
  char* argv[] = {program, option, text, socket_path, NULL};
  snprintf(text, sizeof(text), "%d", number);
  return Spawn(argv);
}

/* Waits until some process ends, and forgets it. */
static pid_t AwaitEnd(int* status) {
  pid_t ended;
  do {
    ended = wait(status);
  } while (ended < 0 && errno == EINTR);
  CHECK(ended > 0);
  for (int i = 0; i <= MAX_RANKS; ++i) {
    if (running[i] == ended) running[i] = 0;
  }
  return ended;
}

pid_t AwaitRank(int* status) {
  const pid_t ended = AwaitEnd(status);
  /* Otherwise the ranks would wait for another one. */
  if (running[0] == 0) Fail(__LINE__, "the daemon ended before its ranks");
  return ended;
}

void AwaitSuccess(void) {
  int status = -1;
  AwaitRank(&status);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int RunProcesses(int argc, char** argv, int (*run_rank)(const char* socket),
                 void (*run_all)(void)) {
  char directory[] = "/tmp/gradsync_test.XXXXXX";
  char flag[80];
  char* daemon_argv[] = {argv[1], flag, NULL};
  if (argc == 4 && strcmp(argv[1], "--rank") == 0) {
    rank = atoi(argv[2]);
    return run_rank(argv[3]);
  }
  if (argc != 2) {
    fprintf(stderr, "usage: %s GRADSYNCD\n", argv[0]);
    return 2;
  }
  program = argv[0];
  CHECK(mkdtemp(directory) != NULL);
  snprintf(socket_path, sizeof(socket_path), "%s/gradsyncd.sock", directory);
  snprintf(flag, sizeof(flag), "--socket=%s", socket_path);
  Spawn(daemon_argv);
  run_all();
  kill(running[0], SIGTERM);
  AwaitEnd(NULL);
  /* The daemon leaves nothing in it. */
  CHECK(rmdir(directory) == 0);
  return 0;
}
