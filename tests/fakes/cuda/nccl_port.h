// Functions of the fake driver, beyond CUDA's own, that the fake of NCCL uses. It finds them by
// dlsym in the libcuda.so.1 that the process has loaded.

#ifndef TESTS_FAKES_CUDA_NCCL_PORT_H_
#define TESTS_FAKES_CUDA_NCCL_PORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/cuda/operation.h"

namespace gradsync::fakes {

// A context for NCCL; opaque.
struct Context;

// Thread-safe.
class NcclPort {
 public:
  // The calling thread's current context. nullptr without one, or after a sticky error.
  virtual Context* Current() = 0;
  virtual std::uint32_t GpuOf(const Context& context) = 0;  // the machine's number
  virtual int OrdinalOf(const Context& context) = 0;        // a CUdevice

  // Enqueues a collective behind `stream` and, unless it is null, behind `after`. `work` may spin.
  // nullptr if `stream` does not exist, belongs to another context, or is capturing.
  virtual std::shared_ptr<Operation> Enqueue(Context* context, CUstream stream,
                                             const std::string& name, std::vector<Access> accesses,
                                             std::shared_ptr<Operation> after,
                                             std::function<CUresult()> work) = 0;
  virtual void AwaitDone(const std::shared_ptr<Operation>& operation) = 0;
  // Waits like the calls of NCCL that free memory or create streams.
  virtual void AwaitUnparked(const Context& context, const std::string& call) = 0;

  // Copies between host and device memory, for `work`. False if the access is illegal.
  virtual bool Read(const Context& context, CUdeviceptr from, void* to, std::size_t bytes) = 0;
  virtual bool Write(const Context& context, const void* from, CUdeviceptr to,
                     std::size_t bytes) = 0;

  // True once the process has its sticky error.
  virtual bool Faulted() = 0;

 protected:
  ~NcclPort() = default;
};

inline constexpr char kNcclPortSymbol[] = "gradsync_fake_cuda_nccl_port";
using NcclPortFunction = NcclPort*();  // returns nullptr without a fake machine

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_NCCL_PORT_H_
