#include "tests/fakes/cuda/driver.h"

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>

namespace gradsync::fakes {

Driver* Driver::Get() {
  static Driver* const driver = []() -> Driver* {
    const StateFolder* const folder = StateFolder::OfThisProcess();
    return folder == nullptr ? nullptr : new Driver(*folder);
  }();
  return driver;
}

std::vector<std::uint32_t> VisibleGpus(const MachineDescription& machine) {
  std::vector<std::uint32_t> visible;
  const char* const list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (std::uint32_t gpu = 0; gpu < machine.gpus.size(); ++gpu) visible.push_back(gpu);
  } else {
    std::istringstream names(list);
    for (std::string name; std::getline(names, name, ',');) {
      std::uint32_t gpu = 0;
      // A number, or the beginning of a UUID. The first item that is neither ends the list.
      while (gpu < machine.gpus.size() && name != std::to_string(gpu) &&
             (name.size() < 5 || machine.gpus[gpu].uuid.compare(0, name.size(), name) != 0)) {
        ++gpu;
      }
      if (gpu == machine.gpus.size()) break;
      visible.push_back(gpu);
    }
  }
  // A process sees at most one MIG device. If it sees one, it sees no other device.
  for (const std::uint32_t gpu : visible) {
    if (machine.gpus[gpu].uuid.compare(0, 4, "MIG-") == 0) return {gpu};
  }
  return visible;
}

std::vector<Context*>& ContextStack() {
  thread_local std::vector<Context*> stack;
  return stack;
}

Context* CurrentContext() {
  const std::vector<Context*>& stack = ContextStack();
  Context* const top = stack.empty() ? nullptr : stack.back();
  return top != nullptr && top->active.load() ? top : nullptr;
}

Context* ContextOf(CUcontext handle) {
  for (Context& context : Driver::Get()->contexts) {
    if (reinterpret_cast<CUcontext>(&context) == handle) return &context;
  }
  return nullptr;
}

StreamHandle StreamOf(Context* context, CUstream handle) {
  Driver& driver = *Driver::Get();
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return {context->legacy_stream, context};
  if (handle == CU_STREAM_PER_THREAD) {
    thread_local std::map<Context*, Stream*> own;
    Stream*& stream = own[context];
    if (stream == nullptr) stream = driver.scheduler.MakeStream(&context->timeline, true, false);
    return {stream, context};
  }
  if (const std::shared_ptr<StreamHandle> found = driver.streams.Find(handle)) return *found;
  driver.folder.Note(kViolation, "a stream that does not exist (any more) is used");
  return {};
}

}  // namespace gradsync::fakes
