#include "tests/fakes/machine/real_gpus.h"

#include <cstdlib>
#include <sstream>

namespace gradsync::fakes {
namespace {

constexpr char kVariable[] = "GRADSYNC_REAL_GPUS";

}  // namespace

const std::vector<std::string>& RealGpus() {
  static const auto* const gpus = [] {
    auto* const list = new std::vector<std::string>;
    const char* const text = std::getenv(kVariable);
    std::istringstream input(text == nullptr ? "" : text);
    for (std::string uuid; std::getline(input, uuid, ',');) list->push_back(uuid);
    return list;
  }();
  return *gpus;
}

std::string RealGpusVariable(const std::vector<std::string>& uuids) {
  std::string text;
  for (const std::string& uuid : uuids) text += (text.empty() ? "" : ",") + uuid;
  return std::string(kVariable) + "=" + text;
}

}  // namespace gradsync::fakes
