// Where --json writes.

#ifndef TOOLS_BENCH_JSON_FILE_H_
#define TOOLS_BENCH_JSON_FILE_H_

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace gradsync::bench {

// Opened before the measurement, so that a wrong path costs no minutes.
class JsonFile {
 public:
  // An empty path means: write nothing.
  static absl::StatusOr<JsonFile> Open(const std::string& path);
  absl::Status Write(const nlohmann::json& document);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_JSON_FILE_H_
