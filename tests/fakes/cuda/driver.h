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

// A device's primary context; a CUcontext. Lives for ever, active or not.
struct Context {
  int ordinal = 0;        // the process's number of the device: a CUdevice
  std::uint32_t gpu = 0;  // the machine's
  Timeline timeline;
  Stream* legacy_stream = nullptr;  // constant once active

  std::atomic<bool> active{false};
  int references = 0;                     // guarded by Driver::contexts_mutex
  std::shared_ptr<Allocation> footprint;  // likewise
};

// A CUevent.
struct Event {
  Timeline* timeline = nullptr;
  bool timing = true;
  Mutex mutex;
  // The latest one; null: never recorded, which counts as complete.
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

  // The process that called cuInit: a forked child may not use what it inherits. 0: nobody.
  std::atomic<int> initialized_in{0};
  // Constant from the first cuInit on.
  std::deque<Context> contexts;
  Mutex contexts_mutex;
};

// The visible devices as CUDA_VISIBLE_DEVICES and MIG leave them: the machine's numbers.
std::vector<std::uint32_t> VisibleGpus(const MachineDescription& machine);

// The calling thread's stack of contexts.
std::vector<Context*>& ContextStack();
Context* CurrentContext();  // nullptr: none, or one that is gone

// Handle of a context -> the context; nullptr if it is none of this process's.
Context* ContextOf(CUcontext handle);

// The stream behind a handle, the default streams of `context` included; {nullptr, nullptr} and a
// line in the journal for one that is not there (any more).
StreamHandle StreamOf(Context* context, CUstream handle);

// Frees what cuMemAlloc gave out in `context` and closes what was opened there (legacy_memory.cc).
void ReleaseLegacyMemory(const Context& context);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_DRIVER_H_
