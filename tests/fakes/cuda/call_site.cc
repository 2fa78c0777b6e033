#include "tests/fakes/cuda/call_site.h"

#include <unistd.h>

#include <string>

#include "tests/fakes/machine/call_counts.h"

namespace gradsync::fakes {

CallSite::CallSite(const char* function) : function_(function) {
  if (Driver* const driver = Driver::Get()) calls_ = &CallCounter(driver->folder, function);
}

CUresult CallSite::Enter(Needs needs) {
  Driver* const driver = Driver::Get();
  if (driver == nullptr) return CUDA_ERROR_NO_DEVICE;
  calls_->fetch_add(1);
  const Fault fault = driver->rules.Meet(function_);
  if (fault.kind == Fault::Kind::kError) return static_cast<CUresult>(fault.code);
  if (fault.kind == Fault::Kind::kSticky) {
    driver->fault.Set(static_cast<CUresult>(fault.code), "injected at " + std::string(function_));
  }
  if (needs == Needs::kNothing) return CUDA_SUCCESS;
  if (driver->initialized_in.load() != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult sticky = driver->fault.Get(); sticky != CUDA_SUCCESS) return sticky;
  if (needs != Needs::kInit && CurrentContext() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_SUCCESS;
}

}  // namespace gradsync::fakes
