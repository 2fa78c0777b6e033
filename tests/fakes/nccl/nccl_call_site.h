// The common part of every call of NCCL. It counts the call and applies injected faults.

#ifndef TESTS_FAKES_NCCL_NCCL_CALL_SITE_H_
#define TESTS_FAKES_NCCL_NCCL_CALL_SITE_H_

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "tests/fakes/machine/call_counts.h"
#include "tests/fakes/nccl/nccl_process.h"

namespace gradsync::fakes {

// One static object per exported function. Thread-safe.
class NcclCallSite {
 public:
  explicit NcclCallSite(const char* function) : function_(function) {
    if (NcclProcess* const process = NcclProcess::Get()) {
      calls_ = &CallCounter(process->folder(), function);
    }
  }

  // Runs `body`, an ncclResult_t(const Fault&), unless a fault makes the call fail.
  template <typename Body>
  ncclResult_t Run(Body body) {
    NcclProcess* const process = NcclProcess::Get();
    if (process == nullptr) return NcclFailure(ncclSystemError, "there is no fake machine");
    calls_->fetch_add(1);
    const Fault fault = process->rules().Meet(function_);
    if (fault.kind == Fault::Kind::kError) {
      return NcclFailure(static_cast<ncclResult_t>(fault.code),
                         "injected at " + std::string(function_));
    }
    return body(fault);
  }

 private:
  const char* const function_;
  std::atomic<std::uint64_t>* calls_ = nullptr;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_NCCL_NCCL_CALL_SITE_H_
