#include "tests/gpu/cuda_load.h"

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

// The most unfinished kernels in RunFor. The queue of a GPU takes about a thousand.
constexpr int kBatch = 8;

}  // namespace

CudaLoad::CudaLoad(std::uint32_t blocks, std::uint64_t floats, CUdeviceptr source)
    : blocks_(blocks), stream_(fakes::MakeStream()) {
  CUmodule module = nullptr;
  CUDA_OK(cuModuleLoadData(&module, daemon::gradsync_cuda_fatbin));
  CUDA_OK(cuModuleGetFunction(&kernel_, module, "gradsync_combine_f32_f32"));
  CUDA_OK(cuFuncLoad(kernel_));
  if (source == 0) {
    source = fakes::MakeFloats(floats);
    CUDA_OK(cuMemsetD32Async(source, 0, floats, stream_));
  }
  arguments_.sources[0] = arguments_.sources[1] = reinterpret_cast<void*>(source);
  arguments_.source_count = 2;
  arguments_.staging = reinterpret_cast<void*>(fakes::MakeFloats(floats + 1));
  arguments_.count = floats;
  CUDA_OK(cuStreamSynchronize(stream_));
}

CUresult CudaLoad::Enqueue() {
  void* parameters[] = {&arguments_};
  return cuLaunchKernel(kernel_, blocks_, 1, 1, daemon::kCudaBlockThreads, 1, 1, 0, stream_,
                        parameters, nullptr);
}

CUresult CudaLoad::RunFor(double milliseconds) {
  CUresult result = CUDA_SUCCESS;
  for (const double end = NowMs() + milliseconds; result == CUDA_SUCCESS && NowMs() < end;) {
    for (int i = 0; result == CUDA_SUCCESS && i < kBatch; ++i) result = Enqueue();
    if (result == CUDA_SUCCESS) result = Finish();
  }
  return result;
}

double CudaLoad::TimeMs(int kernels) {
  const double begin = NowMs();
  for (int i = 0; i < kernels; ++i) CUDA_OK(Enqueue());
  CUDA_OK(Finish());
  return NowMs() - begin;
}

float CudaLoad::Sum() {
  const float sum =
      fakes::ReadFloats(reinterpret_cast<CUdeviceptr>(arguments_.staging), 1, stream_)[0];
  CUDA_OK(Finish());
  return sum;
}

bool UnderMps() {
  int mps = 0;
  CUDA_OK(cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, 0));
  return mps != 0;
}

}  // namespace gradsync::gpu
