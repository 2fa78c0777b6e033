#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "tools/gradsyncctl/run_command.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  const int exit_status =
      gradsync::RunCommand(arguments, std::getenv("GRADSYNC_SOCKET"), std::cout, std::cerr);
  std::cout.flush();
  if (!std::cout) {
    std::cerr << "gradsyncctl: the answer could not be written\n";
    return 2;
  }
  return exit_status;
}
