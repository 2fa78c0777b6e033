#include "tests/fakes/cuda/nccl_port.h"

#include <cstring>
#include <utility>

#include "tests/fakes/cuda/driver.h"

namespace gradsync::fakes {
namespace {

class DriverPort : public NcclPort {
 public:
  explicit DriverPort(Driver* driver) : driver_(*driver) {}

  Context* Current() override {
    return driver_.fault.Get() == CUDA_SUCCESS ? CurrentContext() : nullptr;
  }
  std::uint32_t GpuOf(const Context& context) override { return context.gpu; }
  int OrdinalOf(const Context& context) override { return context.ordinal; }

  std::shared_ptr<Operation> Enqueue(Context* context, CUstream handle, const std::string& name,
                                     std::vector<Access> accesses, std::shared_ptr<Operation> after,
                                     std::function<CUresult()> work) override {
    const StreamHandle stream = StreamOf(context, handle);
    if (stream.stream == nullptr || stream.context != context ||
        driver_.scheduler.Capturing(*stream.stream)) {
      return nullptr;
    }
    auto operation = std::make_shared<Operation>();
    operation->name = name;
    operation->kind = Operation::Kind::kCollective;
    operation->accesses = std::move(accesses);
    operation->work = std::move(work);
    if (after != nullptr) operation->after.push_back(std::move(after));
    driver_.scheduler.Enqueue(stream.stream, operation);
    return operation;
  }

  void AwaitDone(const std::shared_ptr<Operation>& operation) override {
    driver_.scheduler.AwaitDone(operation);
  }
  void AwaitUnparked(const Context& context, const std::string& call) override {
    driver_.scheduler.AwaitNothing(Operation::Kind::kWordWait, context.timeline, call);
  }

  bool Read(const Context& context, CUdeviceptr from, void* to, std::size_t bytes) override {
    const AccessLock lock(driver_.addresses);
    const void* const memory = lock.Translate(context.gpu, from, bytes, false);
    if (memory != nullptr) std::memcpy(to, memory, bytes);
    return memory != nullptr;
  }
  bool Write(const Context& context, const void* from, CUdeviceptr to, std::size_t bytes) override {
    const AccessLock lock(driver_.addresses);
    void* const memory = lock.Translate(context.gpu, to, bytes, true);
    if (memory != nullptr) std::memcpy(memory, from, bytes);
    return memory != nullptr;
  }

  bool Faulted() override { return driver_.fault.Get() != CUDA_SUCCESS; }

 private:
  Driver& driver_;
};

}  // namespace
}  // namespace gradsync::fakes

extern "C" gradsync::fakes::NcclPort* gradsync_fake_cuda_nccl_port() {
  using gradsync::fakes::Driver;
  static auto* const port =
      Driver::Get() == nullptr ? nullptr : new gradsync::fakes::DriverPort(Driver::Get());
  return port;
}
