// NCCL as a table of functions, filled from libnccl.so.2 at run time: the node's own NCCL is used,
// and can be upgraded without building anything again.

#ifndef DAEMON_CUDA_NCCL_LIBRARY_H_
#define DAEMON_CUDA_NCCL_LIBRARY_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nccl.h"

// Every function in use.
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

namespace gradsync {

// ncclMemAlloc and ncclCommRegister came with it.
inline constexpr int kLeastNcclVersion = 21900;
static_assert(NCCL_VERSION_CODE >= kLeastNcclVersion);

// Thread-safe, as far as NCCL is: one thread at a time per communicator. Opening it touches no GPU.
class NcclLibrary {
 public:
  // NOT_FOUND NCCL_MISSING if there is no such library; FAILED_PRECONDITION NCCL_TOO_OLD if it is
  // older than kLeastNcclVersion.
  static absl::StatusOr<std::unique_ptr<const NcclLibrary>> Open(const std::string& path);

  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  // As ncclGetVersion gives it: 22809 is 2.28.9.
  int version() const { return version_; }

  // Statuses as StatusOfNccl (nccl_errors.h); `communicator` may be null.
  absl::Status StatusOf(ncclResult_t result, const char* call, ncclComm_t communicator) const;

  // The functions. They give NCCL's own result: with nonblocking communicators ncclInProgress is
  // one to act on.
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

}  // namespace gradsync

#endif  // DAEMON_CUDA_NCCL_LIBRARY_H_
