// NCCL as a table of functions, which is filled from libnccl.so.2 at run time. So gradsync uses the
// node's own NCCL, which can be upgraded without a new build.

#ifndef DAEMON_CUDA_NCCL_LIBRARY_H_
#define DAEMON_CUDA_NCCL_LIBRARY_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nccl.h"

// Every function that workers use.
#define GRADSYNC_NCCL_FUNCTIONS(FUNCTION) \
  FUNCTION(ncclGetVersion)                \
  FUNCTION(ncclGetUniqueId)               \
  FUNCTION(ncclCommInitRankConfig)        \
  FUNCTION(ncclCommGetAsyncError)         \
  FUNCTION(ncclCommAbort)                 \
  FUNCTION(ncclAllReduce)                 \
  FUNCTION(ncclGroupStart)                \
  FUNCTION(ncclGroupEnd)                  \
  FUNCTION(ncclGetErrorString)            \
  FUNCTION(ncclGetLastError)              \
  FUNCTION(ncclMemAlloc)                  \
  FUNCTION(ncclMemFree)                   \
  FUNCTION(ncclCommRegister)              \
  FUNCTION(ncclCommDeregister)

namespace gradsync::daemon {

// The first version with ncclMemAlloc and ncclCommRegister.
inline constexpr int kLeastNcclVersion = 21900;
static_assert(NCCL_VERSION_CODE >= kLeastNcclVersion);

// Thread-safe, but NCCL allows one thread at a time per communicator. Open() uses no GPU.
class NcclLibrary {
 public:
  // FAILED_PRECONDITION: NCCL_MISSING without such a library. NCCL_TOO_OLD if it is older than
  // kLeastNcclVersion or lacks a function.
  static absl::StatusOr<std::unique_ptr<const NcclLibrary>> Open(const std::string& path);

  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  // In ncclGetVersion's form: 22809 is 2.28.9.
  int version() const { return version_; }

  // Statuses as StatusOfNccl (nccl_errors.h); `communicator` may be null.
  absl::Status StatusOf(ncclResult_t result, const char* call, ncclComm_t communicator) const;

  // The functions. They return NCCL's own result, since ncclInProgress of a nonblocking
  // communicator is no error.
  //
  // NOLINTBEGIN(bugprone-macro-parentheses)
#define GRADSYNC_NCCL_FUNCTION(name) decltype(&::name) name = nullptr;
  GRADSYNC_NCCL_FUNCTIONS(GRADSYNC_NCCL_FUNCTION)
#undef GRADSYNC_NCCL_FUNCTION
  // NOLINTEND(bugprone-macro-parentheses)

 private:
  NcclLibrary() = default;

  int version_ = 0;
};

// "2.28.9".
std::string NcclVersionText(int version);

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_NCCL_LIBRARY_H_
