// Modules and kernels. Unless CUDA_MODULE_LOADING=EAGER, a kernel is loaded by its first launch or
// by cuFuncLoad. Loading waits for kernels that spin.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/call_site.h"
#include "tests/fakes/cuda/enqueue.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/machine/call_counts.h"

namespace gradsync::fakes {
namespace {

constexpr std::uint32_t kFatBinaryMagic = 0xBA55ED50;
constexpr std::uint32_t kElfMagic = 0x464C457F;
constexpr unsigned int kMaxBlockThreads = 1024;

struct Module {
  const Context* context = nullptr;
};

struct Function {
  CUmodule module = nullptr;
  std::string name;
  const Kernel* kernel = nullptr;
  std::atomic<bool> loaded{false};
};

HandleTable<CUmodule, Module>& Modules() {
  static auto* const modules = new HandleTable<CUmodule, Module>;
  return *modules;
}

HandleTable<CUfunction, Function>& Functions() {
  static auto* const functions = new HandleTable<CUfunction, Function>;
  return *functions;
}

void AwaitUnparked(const char* call) {
  Driver::Get()->scheduler.AwaitNothing(Operation::Kind::kWordWait, CurrentContext()->timeline,
                                        call);
}

bool Eager() {
  const char* const mode = std::getenv("CUDA_MODULE_LOADING");
  return mode != nullptr && std::strcmp(mode, "EAGER") == 0;
}

CUresult LoadModule(CUmodule* module, const void* image) {
  std::uint32_t magic = 0;
  std::memcpy(&magic, image, sizeof(magic));
  if (magic != kFatBinaryMagic && magic != kElfMagic) return CUDA_ERROR_INVALID_IMAGE;
  AwaitUnparked("cuModuleLoadData");
  *module = Modules().Add(std::make_shared<Module>(Module{CurrentContext()}));
  return CUDA_SUCCESS;
}

CUresult GetFunction(CUfunction* handle, CUmodule module, const char* name) {
  if (Modules().Find(module) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  auto function = std::make_shared<Function>();
  function->module = module;
  function->name = name;
  function->kernel = FindKernel(name);
  function->loaded.store(Eager());
  if (function->kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
  *handle = Functions().Add(std::move(function));
  return CUDA_SUCCESS;
}

void LoadFunction(Function* function, const std::string& call) {
  if (function->loaded.load()) return;
  AwaitUnparked((call + " of " + function->name).c_str());
  Driver::Get()->scheduler.AwaitNothing(Operation::Kind::kCollective, CurrentContext()->timeline,
                                        call + " of " + function->name);
  function->loaded.store(true);
}

CUresult RunKernel(const Kernel& kernel, const std::vector<char>& arguments,
                   const std::vector<Access>& buffers, std::uint32_t blocks, std::uint32_t gpu) {
  const AccessLock lock(Driver::Get()->addresses);
  for (const Access& buffer : buffers) {
    if (buffer.address % buffer.alignment != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
    if (lock.Translate(gpu, buffer.address, buffer.bytes, buffer.write) == nullptr) {
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
  }
  kernel.run(arguments.data(), blocks, [&](const void* address) {
    return lock.Translate(gpu, reinterpret_cast<CUdeviceptr>(address), 0, false);
  });
  return CUDA_SUCCESS;
}

struct Grid {
  unsigned int x, y, z;
};

CUresult Launch(CUfunction handle, Grid grid, Grid block, CUstream stream, void** parameters) {
  static auto* const moved = &CallCounter(Driver::Get()->folder, kKernelBytes);
  const std::shared_ptr<Function> function = Functions().Find(handle);
  if (function == nullptr || Modules().Find(function->module) == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (parameters == nullptr || grid.x == 0 || block.x == 0 || block.x > kMaxBlockThreads ||
      grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LoadFunction(function.get(), "first launch");
  const Kernel& kernel = *function->kernel;
  const char* const start = static_cast<const char*>(parameters[0]);
  std::vector<char> arguments(start, start + kernel.argument_bytes);
  return Enqueue(stream, [&](Context* context, Operation* operation) {
    operation->name = function->name;
    operation->accesses = kernel.buffers(arguments.data(), grid.x);
    for (const Access& access : operation->accesses) moved->fetch_add(access.bytes);
    operation->work = [&kernel, arguments, buffers = operation->accesses, blocks = grid.x,
                       gpu = context->gpu] {
      return RunKernel(kernel, arguments, buffers, blocks, gpu);
    };
    return CUDA_SUCCESS;
  });
}

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  static CallSite site("cuModuleLoadData");
  return site.Run(Needs::kContext, [&] { return LoadModule(module, image); });
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  static CallSite site("cuModuleUnload");
  return site.Run(Needs::kContext, [&] {
    AwaitUnparked("cuModuleUnload");
    return Modules().Remove(module) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  static CallSite site("cuModuleGetFunction");
  return site.Run(Needs::kContext, [&] { return GetFunction(function, module, name); });
}

CUresult CUDAAPI cuFuncLoad(CUfunction handle) {
  static CallSite site("cuFuncLoad");
  return site.Run(Needs::kContext, [&] {
    const std::shared_ptr<Function> function = Functions().Find(handle);
    if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    LoadFunction(function.get(), "cuFuncLoad");
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int, CUstream stream,
                                void** parameters, void** extra) {
  static CallSite site("cuLaunchKernel");
  return site.Run(Needs::kContextToEnqueue, [&] {
    if (extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
    return Launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, stream,
                  parameters);
  });
}

}  // extern "C"
