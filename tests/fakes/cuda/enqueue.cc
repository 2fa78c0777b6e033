#include "tests/fakes/cuda/enqueue.h"

namespace gradsync::fakes {

CUresult Enqueue(CUstream handle,
                 const std::function<CUresult(Context* context, Operation* operation)>& describe,
                 std::shared_ptr<Operation>* enqueued) {
  Context* const current = CurrentContext();
  const StreamHandle stream = StreamOf(current, handle);
  if (stream.stream == nullptr || stream.context != current) return CUDA_ERROR_INVALID_HANDLE;
  auto operation = std::make_shared<Operation>();
  if (const CUresult error = describe(current, operation.get()); error != CUDA_SUCCESS) {
    return error;
  }
  if (enqueued != nullptr) *enqueued = operation;
  Driver::Get()->scheduler.Enqueue(stream.stream, std::move(operation));
  return CUDA_SUCCESS;
}

}  // namespace gradsync::fakes
