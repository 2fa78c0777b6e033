// The driver of this process: its parts, its devices and their primary contexts.

#ifndef TESTS_FAKES_CUDA_DRIVER_H_
#define TESTS_FAKES_CUDA_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "daemon/base/mutex.h"
#include "tests/fakes/cuda/address_space.h"
#include "tests/fakes/cuda/cuda_declarations.h"
#include "tests/fakes/cuda/process_fault.h"
#include "tests/fakes/cuda/scheduler.h"
#include "tests/fakes/machine/device_memory.h"
#include "tests/fakes/machine/fault_rules.h"
#include "tests/fakes/machine/handle_table.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

// A device's primary context; a CUcontext. Never destroyed, active or not.
struct Context {
  int ordinal = 0;        // the device's number in this process: a CUdevice
  std::uint32_t gpu = 0;  // the device's number in the machine
  Timeline timeline;
  Stream* legacy_stream = nullptr;  // constant once the context is active

  std::atomic<bool> active{false};
  int references = 0;                     // guarded by Driver::contexts_mutex
  std::shared_ptr<Allocation> footprint;  // guarded by Driver::contexts_mutex
};

// A CUevent.
struct Event {
  Timeline* timeline = nullptr;
  bool timing = true;
  daemon::Mutex mutex;
  // The latest record. Null if the event was never recorded; then it counts as complete.
  std::shared_ptr<Operation> record ABSL_GUARDED_BY(mutex);
};

struct StreamHandle {
  Stream* stream = nullptr;
  Context* context = nullptr;
};

// One per process, never destroyed: queues run to the end of the process.
struct Driver {
  explicit Driver(const StateFolder& state)
      : folder(state), rules(state), fault(state), scheduler(state, &fault) {}

  // nullptr if the environment names no fake machine.
  static Driver* Get();

  const StateFolder& folder;
  const MachineDescription& machine() const { return folder.machine(); }

  // Own synchronization.
  FaultRules rules;
  ProcessFault fault;
  Scheduler scheduler;
  AddressSpace addresses;
  HandleTable<CUstream, StreamHandle> streams;
  HandleTable<CUevent, Event> events;

  // The process that called cuInit, or 0. A forked child must not use what it inherits.
  std::atomic<int> initialized_in{0};
  // Constant from the first cuInit on.
  std::deque<Context> contexts;
  daemon::Mutex contexts_mutex;
};

// The machine's numbers of the devices that CUDA_VISIBLE_DEVICES and MIG leave visible.
std::vector<std::uint32_t> VisibleGpus(const MachineDescription& machine);

// The calling thread's stack of contexts.
std::vector<Context*>& ContextStack();
Context* CurrentContext();  // nullptr if there is none, or if it is not active

// The context of a handle; nullptr if this process has no such context.
Context* ContextOf(CUcontext handle);

// The stream of a handle, which may be a default stream of `context`. For an invalid or destroyed
// stream: {nullptr, nullptr} and a violation.
StreamHandle StreamOf(Context* context, CUstream handle);

// Frees the memory of cuMemAlloc in `context` and closes its IPC handles
// (legacy_memory_entries.cc).
void ReleaseLegacyMemory(const Context& context);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_DRIVER_H_
