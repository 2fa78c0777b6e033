#include "daemon/cuda/nccl_library.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"
#include "daemon/cuda/nccl_errors.h"
#include "daemon/cuda/shared_library.h"

namespace gradsync::daemon {
namespace {

absl::Status TooOld(const SharedLibrary& library, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNcclTooOld,
                   absl::StrCat(library.path(), " ", what, ": gradsync needs NCCL ",
                                NcclVersionText(kLeastNcclVersion), " or newer"));
}

}  // namespace

std::string NcclVersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

absl::StatusOr<std::unique_ptr<const NcclLibrary>> NcclLibrary::Open(const std::string& path) {
  const auto library = SharedLibrary::Open(path);
  if (!library.ok()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNcclMissing,
                     absl::StrCat("no NCCL: ", library.status().message()));
  }
  auto nccl = std::unique_ptr<NcclLibrary>(new NcclLibrary);
  std::vector<std::string> missing;
#define GRADSYNC_FIND_NCCL_FUNCTION(name)                                 \
  nccl->name = reinterpret_cast<decltype(&::name)>(library->Find(#name)); \
  if (nccl->name == nullptr) missing.emplace_back(#name);
  GRADSYNC_NCCL_FUNCTIONS(GRADSYNC_FIND_NCCL_FUNCTION)
#undef GRADSYNC_FIND_NCCL_FUNCTION
  // Checks the version first: it says more than the list of missing functions.
  if (nccl->ncclGetVersion != nullptr && nccl->ncclGetVersion(&nccl->version_) == ncclSuccess &&
      nccl->version_ < kLeastNcclVersion) {
    return TooOld(*library, absl::StrCat("is version ", NcclVersionText(nccl->version_)));
  }
  if (!missing.empty()) {
    return TooOld(*library, absl::StrCat("has no ", absl::StrJoin(missing, ", ")));
  }
  return nccl;
}

absl::Status NcclLibrary::StatusOf(ncclResult_t result, const char* call,
                                   ncclComm_t communicator) const {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* const text = ncclGetErrorString(result);
  const char* const last = ncclGetLastError(communicator);
  return StatusOfNccl(result, call, text != nullptr ? text : "", last != nullptr ? last : "");
}

}  // namespace gradsync::daemon
