// cuGetProcAddress: finds a function by its plain name and by the caller's version of CUDA. It
// returns the newest variant up to that version, even if that has other parameters
// (cuCtxSynchronize and cuStreamGetCtx of 12.5 and 13.0), and no names with "_v2".

#include <cstring>
#include <type_traits>

#include "tests/fakes/cuda/call_site.h"

namespace {

struct Variant {
  const char* name;
  int version;  // the first version of CUDA that has it
  void* function;
};

// Checks that the function has CUDA's type for this variant.
#define VARIANT(name, version, function)                                          \
  [] {                                                                            \
    static_assert(std::is_same_v<decltype(&(function)), PFN_##name##_v##version>, \
                  "not the signature of " #name);                                 \
    return Variant{#name, version, reinterpret_cast<void*>(&(function))};         \
  }()

const Variant kVariants[] = {
    VARIANT(cuInit, 2000, cuInit),
    VARIANT(cuDriverGetVersion, 2020, cuDriverGetVersion),
    VARIANT(cuGetProcAddress, 12000, cuGetProcAddress_v2),
    VARIANT(cuGetErrorName, 6000, cuGetErrorName),
    VARIANT(cuGetErrorString, 6000, cuGetErrorString),
    VARIANT(cuDeviceGetCount, 2000, cuDeviceGetCount),
    VARIANT(cuDeviceGet, 2000, cuDeviceGet),
    VARIANT(cuDeviceGetUuid, 9020, cuDeviceGetUuid),
    VARIANT(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2),
    VARIANT(cuDeviceGetName, 2000, cuDeviceGetName),
    VARIANT(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute),
    VARIANT(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2),
    VARIANT(cuMemGetInfo, 3020, cuMemGetInfo_v2),
    VARIANT(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain),
    VARIANT(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2),
    VARIANT(cuCtxSetCurrent, 4000, cuCtxSetCurrent),
    VARIANT(cuCtxGetCurrent, 4000, cuCtxGetCurrent),
    VARIANT(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2),
    VARIANT(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2),
    VARIANT(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange),
    VARIANT(cuCtxSynchronize, 2000, cuCtxSynchronize),
    VARIANT(cuCtxSynchronize, 13000, cuCtxSynchronize_v2),
    VARIANT(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority),
    VARIANT(cuStreamDestroy, 4000, cuStreamDestroy_v2),
    VARIANT(cuStreamSynchronize, 2000, cuStreamSynchronize),
    VARIANT(cuStreamQuery, 2000, cuStreamQuery),
    VARIANT(cuStreamGetCtx, 9020, cuStreamGetCtx),
    VARIANT(cuStreamGetCtx, 12050, cuStreamGetCtx_v2),
    VARIANT(cuStreamWaitEvent, 3020, cuStreamWaitEvent),
    VARIANT(cuStreamWaitValue64, 9000, cuStreamWaitValue64),
    VARIANT(cuStreamWaitValue64, 11070, cuStreamWaitValue64_v2),
    VARIANT(cuStreamWriteValue64, 9000, cuStreamWriteValue64),
    VARIANT(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2),
    VARIANT(cuStreamIsCapturing, 10000, cuStreamIsCapturing),
    VARIANT(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2),
    VARIANT(cuStreamEndCapture, 10000, cuStreamEndCapture),
    VARIANT(cuEventCreate, 2000, cuEventCreate),
    VARIANT(cuEventRecord, 2000, cuEventRecord),
    VARIANT(cuEventQuery, 2000, cuEventQuery),
    VARIANT(cuEventSynchronize, 2000, cuEventSynchronize),
    VARIANT(cuEventElapsedTime, 2000, cuEventElapsedTime),
    VARIANT(cuEventElapsedTime, 12080, cuEventElapsedTime_v2),
    VARIANT(cuEventDestroy, 4000, cuEventDestroy_v2),
    VARIANT(cuMemCreate, 10020, cuMemCreate),
    VARIANT(cuMemRelease, 10020, cuMemRelease),
    VARIANT(cuMemAddressReserve, 10020, cuMemAddressReserve),
    VARIANT(cuMemAddressFree, 10020, cuMemAddressFree),
    VARIANT(cuMemMap, 10020, cuMemMap),
    VARIANT(cuMemUnmap, 10020, cuMemUnmap),
    VARIANT(cuMemSetAccess, 10020, cuMemSetAccess),
    VARIANT(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity),
    VARIANT(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle),
    VARIANT(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle),
    VARIANT(cuMemAlloc, 3020, cuMemAlloc_v2),
    VARIANT(cuMemFree, 3020, cuMemFree_v2),
    VARIANT(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle),
    VARIANT(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2),
    VARIANT(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle),
    VARIANT(cuMemHostRegister, 6050, cuMemHostRegister_v2),
    VARIANT(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2),
    VARIANT(cuMemHostUnregister, 4000, cuMemHostUnregister),
    VARIANT(cuMemHostAlloc, 2020, cuMemHostAlloc),
    VARIANT(cuMemFreeHost, 2000, cuMemFreeHost),
    VARIANT(cuMemcpyAsync, 4000, cuMemcpyAsync),
    VARIANT(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2),
    VARIANT(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2),
    VARIANT(cuMemsetD8Async, 3020, cuMemsetD8Async),
    VARIANT(cuMemsetD32Async, 3020, cuMemsetD32Async),
    VARIANT(cuModuleLoadData, 2000, cuModuleLoadData),
    VARIANT(cuModuleGetFunction, 2000, cuModuleGetFunction),
    VARIANT(cuModuleUnload, 2000, cuModuleUnload),
    VARIANT(cuFuncLoad, 12040, cuFuncLoad),
    VARIANT(cuLaunchKernel, 4000, cuLaunchKernel),
};

CUresult Find(const char* name, void** function, int version,
              CUdriverProcAddressQueryResult* status) {
  const Variant* best = nullptr;
  bool too_new = false;
  int driver_version = CUDA_VERSION;
  if (const auto* const driver = gradsync::fakes::Driver::Get()) {
    driver_version = driver->machine().driver_version;
  }
  for (const Variant& variant : kVariants) {
    if (std::strcmp(variant.name, name) != 0 || variant.version > driver_version) continue;
    if (variant.version > version) {
      too_new = true;
    } else if (best == nullptr || variant.version > best->version) {
      best = &variant;
    }
  }
  *function = best == nullptr ? nullptr : best->function;
  if (status != nullptr) {
    *status = best != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
              : too_new       ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                              : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  // If the caller asks for the status, a missing function is not an error.
  return best == nullptr && status == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuGetProcAddress_v2(const char* name, void** function, int version,
                                     cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
  // The fake has no default streams per thread.
  if (name == nullptr || function == nullptr || (flags & ~1ull) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return Find(name, function, version, status);
}

}  // extern "C"
