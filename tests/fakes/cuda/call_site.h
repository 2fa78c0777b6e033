// The common part of every call of the driver. It counts the call, applies injected faults, and
// refuses the call without cuInit, in a forked child, after a sticky error, or without a current
// context.

#ifndef TESTS_FAKES_CUDA_CALL_SITE_H_
#define TESTS_FAKES_CUDA_CALL_SITE_H_

#include <atomic>
#include <cstdint>

#include "tests/fakes/cuda/driver.h"

namespace gradsync::fakes {

// What a function requires. kContextToEnqueue: a context. The function only enqueues work. The
// work's own error comes with a later call, even if the work has ended before this one returns.
enum class Needs { kNothing, kInit, kContext, kContextToEnqueue };

// One static object per exported function. Thread-safe.
class CallSite {
 public:
  explicit CallSite(const char* function);

  // Runs `body`, a CUresult(), unless the call is refused. The sticky error comes before the
  // body's own result.
  template <typename Body>
  CUresult Run(Needs needs, Body body) {
    const CUresult refusal = Enter(needs);
    if (refusal != CUDA_SUCCESS) return refusal;
    const CUresult result = body();
    if (needs == Needs::kNothing || needs == Needs::kContextToEnqueue) return result;
    const CUresult fault = Driver::Get()->fault.Get();
    return fault != CUDA_SUCCESS ? fault : result;
  }

 private:
  CUresult Enter(Needs needs);

  const char* const function_;
  std::atomic<std::uint64_t>* calls_ = nullptr;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_CALL_SITE_H_
