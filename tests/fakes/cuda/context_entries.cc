// Primary contexts, and the current context of the calling thread.

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "tests/fakes/cuda/call_site.h"

namespace gradsync::fakes {
namespace {

constexpr std::size_t kDefaultQueues = 8;
constexpr std::size_t kDefaultQueuesOfMpsClient = 2;  // from Volta on
constexpr std::size_t kMaxQueues = 32;

std::size_t HardwareQueues(bool mps) {
  std::size_t queues = mps ? kDefaultQueuesOfMpsClient : kDefaultQueues;
  if (const char* const text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) {
    queues = std::strtoul(text, nullptr, 10);
  }
  return queues == 0 ? 1 : std::min(queues, kMaxQueues);
}

// True if compute mode and MPS allow a new context on the device.
CUresult Admit(const Driver& driver, std::uint32_t gpu) {
  const MachineDescription& machine = driver.machine();
  const ComputeMode mode = machine.gpus[gpu].mode;
  if (mode == ComputeMode::kProhibited) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  bool noted = false;
  for (;;) {
    bool others = false;
    bool other_user = false;
    for (const AllocationHeader& live : LiveAllocations(driver.folder, gpu)) {
      if (live.kind != MemoryKind::kContext || live.pid == getpid()) continue;
      others = true;
      other_user |= live.uid != getuid();
    }
    if (!machine.mps) {
      return others && mode == ComputeMode::kExclusiveProcess ? CUDA_ERROR_DEVICE_UNAVAILABLE
                                                              : CUDA_SUCCESS;
    }
    if (driver.folder.board().mps_fault[gpu].load() != CUDA_SUCCESS) {
      // MPS refuses new clients until all failed ones have ended.
      if (others) return CUDA_ERROR_MPS_SERVER_NOT_READY;
      driver.folder.board().mps_fault[gpu].store(CUDA_SUCCESS);
    }
    if (!other_user) return CUDA_SUCCESS;
    // MPS serves one user at a time. The next user waits.
    if (!noted) driver.folder.Note(kBlocked, "cuDevicePrimaryCtxRetain behind another user's MPS");
    noted = true;
    // Polls, since the release of a file lock wakes no process.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Context* PrimaryContext(CUdevice device) {
  auto& contexts = Driver::Get()->contexts;
  if (device < 0 || static_cast<std::size_t>(device) >= contexts.size()) return nullptr;
  return &contexts[static_cast<std::size_t>(device)];
}

CUresult Retain(CUcontext* handle, CUdevice device) {
  Driver& driver = *Driver::Get();
  Context* const context = PrimaryContext(device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  daemon::MutexLock lock(&driver.contexts_mutex);
  if (context->references == 0) {
    if (const CUresult refusal = Admit(driver, context->gpu); refusal != CUDA_SUCCESS) {
      return refusal;
    }
    context->footprint = Allocation::Create(driver.folder, context->gpu, MemoryKind::kContext,
                                            driver.machine().context_bytes);
    if (context->footprint == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    driver.fault.Join(context->gpu);
    driver.scheduler.Start(&context->timeline, HardwareQueues(driver.machine().mps));
    if (context->legacy_stream == nullptr) {
      context->legacy_stream = driver.scheduler.MakeStream(&context->timeline, false, true);
    }
    context->active.store(true);
  }
  ++context->references;
  *handle = reinterpret_cast<CUcontext>(context);
  return CUDA_SUCCESS;
}

CUresult Release(CUdevice device) {
  Driver& driver = *Driver::Get();
  Context* const context = PrimaryContext(device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  daemon::MutexLock lock(&driver.contexts_mutex);
  if (context->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--context->references > 0) return CUDA_SUCCESS;
  driver.scheduler.AwaitNothing(Operation::Kind::kWordWait, context->timeline,
                                "cuDevicePrimaryCtxRelease");
  driver.scheduler.AwaitIdle(context->timeline);
  context->active.store(false);
  driver.streams.RemoveIf([&](const StreamHandle& handle) {
    if (handle.context != context) return false;
    driver.scheduler.ForgetStream(handle.stream);
    return true;
  });
  driver.events.RemoveIf([&](const Event& event) { return event.timeline == &context->timeline; });
  ReleaseLegacyMemory(*context);
  context->footprint.reset();
  return CUDA_SUCCESS;
}

// nullptr means the current context.
Context* ActiveContext(CUcontext handle) {
  Context* const context = handle == nullptr ? CurrentContext() : ContextOf(handle);
  return context != nullptr && context->active.load() ? context : nullptr;
}

CUresult Synchronize(Context* context) {
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  Scheduler& scheduler = Driver::Get()->scheduler;
  // Whatever the modes of the captures and of this thread.
  if (scheduler.InvalidateCaptures(context->timeline)) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  scheduler.AwaitIdle(context->timeline);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  static CallSite site("cuDevicePrimaryCtxRetain");
  return site.Run(Needs::kInit, [&] { return Retain(context, device); });
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  static CallSite site("cuDevicePrimaryCtxRelease_v2");
  return site.Run(Needs::kInit, [&] { return Release(device); });
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext handle) {
  static CallSite site("cuCtxSetCurrent");
  return site.Run(Needs::kInit, [&] {
    std::vector<Context*>& stack = ContextStack();
    if (!stack.empty()) stack.pop_back();
    if (handle == nullptr) return CUDA_SUCCESS;
    Context* const context = ActiveContext(handle);
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    stack.push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* handle) {
  static CallSite site("cuCtxGetCurrent");
  return site.Run(Needs::kInit, [&] {
    *handle = reinterpret_cast<CUcontext>(CurrentContext());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext handle) {
  static CallSite site("cuCtxPushCurrent_v2");
  return site.Run(Needs::kInit, [&] {
    Context* const context = handle == nullptr ? nullptr : ActiveContext(handle);
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    ContextStack().push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext* handle) {
  static CallSite site("cuCtxPopCurrent_v2");
  return site.Run(Needs::kInit, [&] {
    std::vector<Context*>& stack = ContextStack();
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (handle != nullptr) *handle = reinterpret_cast<CUcontext>(stack.back());
    stack.pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  static CallSite site("cuCtxGetStreamPriorityRange");
  return site.Run(Needs::kContext, [&] {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxSynchronize(void) {
  static CallSite site("cuCtxSynchronize");
  return site.Run(Needs::kContext, [&] { return Synchronize(CurrentContext()); });
}

CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext handle) {
  static CallSite site("cuCtxSynchronize_v2");
  return site.Run(Needs::kInit, [&] { return Synchronize(ActiveContext(handle)); });
}

}  // extern "C"
