// The state of the fake NCCL in this process: the fake machine and the driver.

#ifndef TESTS_FAKES_NCCL_NCCL_PROCESS_H_
#define TESTS_FAKES_NCCL_NCCL_PROCESS_H_

#include <nccl.h>

#include <cstddef>
#include <set>
#include <string>

#include "daemon/base/mutex.h"
#include "tests/fakes/cuda/nccl_port.h"
#include "tests/fakes/machine/fault_rules.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

// One per process, never destroyed. Thread-safe.
class NcclProcess {
 public:
  // nullptr if the environment names no fake machine.
  static NcclProcess* Get();

  const StateFolder& folder() const { return folder_; }
  FaultRules& rules() { return rules_; }

  // The driver that the process has loaded, or nullptr. The first call looks it up.
  NcclPort* port();
  // The function of that driver with this exported name, or nullptr.
  void* DriverFunction(const char* name);

  // The start addresses of registered memory.
  void NoteRegistered(CUdeviceptr buffer);
  void NoteDeregistered(CUdeviceptr buffer);
  bool AnyRegistered(CUdeviceptr begin, std::size_t bytes);

 private:
  explicit NcclProcess(const StateFolder& folder) : folder_(folder), rules_(folder) {}

  const StateFolder& folder_;
  FaultRules rules_;

  daemon::Mutex mutex_;
  std::multiset<CUdeviceptr> registered_ ABSL_GUARDED_BY(mutex_);
};

// Keeps `text` for ncclGetLastError in this thread, and returns `result`.
ncclResult_t NcclFailure(ncclResult_t result, const std::string& text);
const char* NcclLastError();

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_NCCL_NCCL_PROCESS_H_
