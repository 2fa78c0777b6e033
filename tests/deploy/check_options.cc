// Whether gradsyncd would take its arguments: prints every fault and exits with 2 if not.

#include <cstdio>
#include <string>

#include "daemon/config/options.h"

int main(int argc, char** argv) {
  const auto options = gradsync::LoadOptions(argc, argv);
  if (options.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(options.status().message()).c_str());
  return 2;
}
