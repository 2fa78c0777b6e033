// Runs a command on a fake machine, and removes the machine when the command ends:
//
//   fake_machine [--gpus=N] [--mps] -- COMMAND...
//
// Its exit status is the command's, 128 + the signal that ended it, or 2 for wrong usage. The
// processes of the command have to find the fakes themselves: LD_LIBRARY_PATH, --cuda_library.

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/fakes/control.h"

namespace gradsync::fakes {
namespace {

int Run(const MachineDescription& description, char** command) {
  const FakeMachine machine(description);
  const std::string variable = machine.Environment();
  const std::size_t equals = variable.find('=');
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
    execvp(command[0], command);
    std::perror(command[0]);
    _exit(127);
  }
  // A signal to the process group ends the command. Then this process removes the machine.
  signal(SIGTERM, SIG_IGN);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace
}  // namespace gradsync::fakes

int main(int argc, char** argv) {
  int gpus = 1;
  bool mps = false;
  int next = 1;
  for (; next < argc; ++next) {
    const std::string argument = argv[next];
    if (argument == "--") break;
    if (argument == "--mps") {
      mps = true;
    } else if (argument.rfind("--gpus=", 0) == 0) {
      gpus = std::atoi(argument.c_str() + 7);
    } else {
      std::fprintf(stderr, "fake_machine: unknown argument %s\n", argv[next]);
      return 2;
    }
  }
  if (next + 1 >= argc || gpus < 1) {
    std::fprintf(stderr, "usage: fake_machine [--gpus=N] [--mps] -- COMMAND...\n");
    return 2;
  }
  gradsync::fakes::MachineDescription description = gradsync::fakes::MachineWithGpus(gpus);
  description.mps = mps;
  return gradsync::fakes::Run(description, argv + next + 1);
}
