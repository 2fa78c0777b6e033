// Checks options of gradsyncd. Prints every fault and exits with 2 if gradsyncd would refuse them.

#include <cstdio>
#include <string>

#include "daemon/config/options.h"

int main(int argc, char** argv) {
  const auto options = gradsync::daemon::LoadOptions(argc, argv);
  if (options.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(options.status().message()).c_str());
  return 2;
}
