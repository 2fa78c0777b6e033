#include "client/examples/run_directory.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/un.h>

#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::examples {
namespace {

constexpr char kTemplate[] = "/gradsync-XXXXXX";
constexpr char kLongestName[] = "/gradsyncd-99-fd.sock";

}  // namespace

absl::StatusOr<std::unique_ptr<RunDirectory>> RunDirectory::Create() {
  const char* chosen = std::getenv("TMPDIR");
  std::string path = chosen == nullptr || *chosen == '\0' ? "/tmp" : chosen;
  if (path.size() + sizeof(kTemplate) + sizeof(kLongestName) > sizeof(sockaddr_un::sun_path)) {
    path = "/tmp";
  }
  path += kTemplate;
  if (mkdtemp(path.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot make a directory ", path, ": ",
                                               std::strerror(errno),
                                               "; set TMPDIR to one that is writable"));
  }
  return std::unique_ptr<RunDirectory>(new RunDirectory(std::move(path)));
}

RunDirectory::RunDirectory(std::string path) : path_(std::move(path)) {}

RunDirectory::~RunDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace gradsync::examples
