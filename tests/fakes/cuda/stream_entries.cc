// Streams, and the words in memory that they wait for and write.

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "tests/fakes/cuda/call_site.h"
#include "tests/fakes/cuda/enqueue.h"

namespace gradsync::fakes {
namespace {

constexpr unsigned int kWaitKinds = 0x3;

// How often a parked queue reads its word.
constexpr std::chrono::microseconds kWordPoll(20);

bool Satisfied(std::uint64_t word, std::uint64_t value, unsigned int kind) {
  switch (kind) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<std::int64_t>(word - value) >= 0;  // cyclic and signed
    case CU_STREAM_WAIT_VALUE_EQ:
      return word == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (word & value) != 0;
    default:
      return ~(word | value) != 0;
  }
}

// The word at a device address. nullptr if the access is illegal. Use it only under the lock.
std::atomic<std::uint64_t>* WordAt(const AccessLock& lock, std::uint32_t gpu, CUdeviceptr address,
                                   bool write) {
  return static_cast<std::atomic<std::uint64_t>*>(
      lock.Translate(gpu, address, sizeof(std::uint64_t), write));
}

// The errors of a memory operation that are known when it is enqueued.
CUresult CheckWord(const Context& context, CUdeviceptr address) {
  Driver& driver = *Driver::Get();
  if (!driver.machine().gpus[context.gpu].stream_memory_operations) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (address % sizeof(std::uint64_t) != 0 || !driver.addresses.Contains(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult WaitForWord(CUstream handle, CUdeviceptr address, std::uint64_t value,
                     unsigned int flags) {
  // CU_STREAM_WAIT_VALUE_FLUSH is not supported, as on most machines.
  if ((flags & ~kWaitKinds) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  return Enqueue(handle, [&](Context* context, Operation* operation) {
    if (const CUresult wrong = CheckWord(*context, address); wrong != CUDA_SUCCESS) return wrong;
    operation->name = "cuStreamWaitValue64";
    operation->kind = Operation::Kind::kWordWait;
    operation->work = [gpu = context->gpu, address, value, flags] {
      Driver& driver = *Driver::Get();
      while (driver.fault.Get() == CUDA_SUCCESS) {
        {
          const AccessLock lock(driver.addresses);
          const auto* const word = WordAt(lock, gpu, address, false);
          if (word == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
          if (Satisfied(word->load(std::memory_order_acquire), value, flags)) return CUDA_SUCCESS;
        }
        // Polls as a GPU does, since a store to the word wakes no thread.
        std::this_thread::sleep_for(kWordPoll);
      }
      return CUDA_SUCCESS;
    };
    return CUDA_SUCCESS;
  });
}

CUresult WriteWord(CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned int flags) {
  if ((flags & ~static_cast<unsigned int>(CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return Enqueue(handle, [&](Context* context, Operation* operation) {
    if (const CUresult wrong = CheckWord(*context, address); wrong != CUDA_SUCCESS) return wrong;
    operation->name = "cuStreamWriteValue64";
    operation->work = [gpu = context->gpu, address, value] {
      const AccessLock lock(Driver::Get()->addresses);
      auto* const word = WordAt(lock, gpu, address, true);
      if (word == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
      word->store(value, std::memory_order_release);
      return CUDA_SUCCESS;
    };
    return CUDA_SUCCESS;
  });
}

CUresult Create(CUstream* handle, unsigned int flags) {
  if ((flags & ~static_cast<unsigned int>(CU_STREAM_NON_BLOCKING)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Driver& driver = *Driver::Get();
  Context* const context = CurrentContext();
  driver.scheduler.AwaitNothing(Operation::Kind::kWordWait, context->timeline,
                                "cuStreamCreateWithPriority");
  const bool blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
  *handle = driver.streams.Add(std::make_shared<StreamHandle>(
      StreamHandle{driver.scheduler.MakeStream(&context->timeline, blocking, false), context}));
  return CUDA_SUCCESS;
}

// The stream of a call, and its context.
StreamHandle Resolve(CUstream handle) { return StreamOf(CurrentContext(), handle); }

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* handle, unsigned int flags, int) {
  static CallSite site("cuStreamCreateWithPriority");
  return site.Run(Needs::kContext, [&] { return Create(handle, flags); });
}

CUresult CUDAAPI cuStreamDestroy_v2(CUstream handle) {
  static CallSite site("cuStreamDestroy_v2");
  return site.Run(Needs::kContext, [&] {
    Driver& driver = *Driver::Get();
    const std::shared_ptr<StreamHandle> removed = driver.streams.Remove(handle);
    if (removed == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    driver.scheduler.ForgetStream(removed->stream);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  static CallSite site("cuStreamSynchronize");
  return site.Run(Needs::kContext, [&] {
    Scheduler& scheduler = Driver::Get()->scheduler;
    const StreamHandle stream = Resolve(handle);
    if (stream.stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (scheduler.Capturing(*stream.stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    scheduler.AwaitDone(scheduler.LastOf(*stream.stream));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
  static CallSite site("cuStreamQuery");
  return site.Run(Needs::kContext, [&] {
    Scheduler& scheduler = Driver::Get()->scheduler;
    const StreamHandle stream = Resolve(handle);
    if (stream.stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (scheduler.Capturing(*stream.stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const std::shared_ptr<Operation> last = scheduler.LastOf(*stream.stream);
    return last == nullptr || scheduler.Done(*last) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext* context) {
  static CallSite site("cuStreamGetCtx");
  return site.Run(Needs::kContext, [&] {
    const StreamHandle stream = Resolve(handle);
    if (stream.stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *context = reinterpret_cast<CUcontext>(stream.context);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamGetCtx_v2(CUstream handle, CUcontext* context, CUgreenCtx* green) {
  if (green != nullptr) *green = nullptr;
  return cuStreamGetCtx(handle, context);
}

CUresult CUDAAPI cuStreamWaitValue64_v2(CUstream handle, CUdeviceptr address, cuuint64_t value,
                                        unsigned int flags) {
  static CallSite site("cuStreamWaitValue64_v2");
  return site.Run(Needs::kContextToEnqueue,
                  [&] { return WaitForWord(handle, address, value, flags); });
}

CUresult CUDAAPI cuStreamWriteValue64_v2(CUstream handle, CUdeviceptr address, cuuint64_t value,
                                         unsigned int flags) {
  static CallSite site("cuStreamWriteValue64_v2");
  return site.Run(Needs::kContextToEnqueue,
                  [&] { return WriteWord(handle, address, value, flags); });
}

// The first versions of these functions, which have the plain names. New devices refuse them.
CUresult CUDAAPI cuStreamWaitValue64(CUstream, CUdeviceptr, cuuint64_t, unsigned int) {
  static CallSite site("cuStreamWaitValue64");
  return site.Run(Needs::kContext, [] { return CUDA_ERROR_NOT_SUPPORTED; });
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream, CUdeviceptr, cuuint64_t, unsigned int) {
  static CallSite site("cuStreamWriteValue64");
  return site.Run(Needs::kContext, [] { return CUDA_ERROR_NOT_SUPPORTED; });
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  static CallSite site("cuStreamIsCapturing");
  return site.Run(Needs::kContext, [&] {
    const StreamHandle stream = Resolve(handle);
    if (stream.stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *status = Driver::Get()->scheduler.CaptureOf(*stream.stream);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode) {
  static CallSite site("cuStreamBeginCapture_v2");
  return site.Run(Needs::kContext, [&] {
    const StreamHandle stream = Resolve(handle);
    if (stream.stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    // The legacy default stream cannot be captured.
    if (stream.stream == stream.context->legacy_stream) {
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    Driver::Get()->scheduler.BeginCapture(stream.stream);
    return CUDA_SUCCESS;
  });
}

// Returns no graph, since the fake cannot replay one.
CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  static CallSite site("cuStreamEndCapture");
  return site.Run(Needs::kContext, [&] {
    const StreamHandle stream = Resolve(handle);
    if (stream.stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (graph != nullptr) *graph = nullptr;
    return Driver::Get()->scheduler.EndCapture(stream.stream) ==
                   CU_STREAM_CAPTURE_STATUS_INVALIDATED
               ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
               : CUDA_SUCCESS;
  });
}

}  // extern "C"
