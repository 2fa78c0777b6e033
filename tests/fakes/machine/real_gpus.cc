#include "tests/fakes/machine/real_gpus.h"

#include <cstdlib>
#include <sstream>

namespace gradsync::fakes {

const std::vector<std::string>& RealGpus() {
  static const auto* const gpus = [] {
    auto* const list = new std::vector<std::string>;
    const char* const text = std::getenv("GRADSYNC_REAL_GPUS");
    std::istringstream input(text == nullptr ? "" : text);
    for (std::string uuid; std::getline(input, uuid, ',');) list->push_back(uuid);
    return list;
  }();
  return *gpus;
}

}  // namespace gradsync::fakes
