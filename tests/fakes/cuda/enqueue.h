// From a call's arguments to an operation on a stream.

#ifndef TESTS_FAKES_CUDA_ENQUEUE_H_
#define TESTS_FAKES_CUDA_ENQUEUE_H_

#include <functional>
#include <memory>

#include "tests/fakes/cuda/driver.h"

namespace gradsync::fakes {

// Enqueues what `describe` fills in, unless it returns an error. The stream must belong to the
// current context: CUDA_ERROR_INVALID_HANDLE otherwise. If `enqueued` is not null it gets the
// operation.
CUresult Enqueue(CUstream handle,
                 const std::function<CUresult(Context* context, Operation* operation)>& describe,
                 std::shared_ptr<Operation>* enqueued = nullptr);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_ENQUEUE_H_
