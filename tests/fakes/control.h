// A fake machine with GPUs for one test: the test describes it, injects faults, and reads counters,
// the journal and the use of device memory. tests/fakes/README.md says what the fakes model.
//
//   FakeMachine machine({.gpus = ...});
//   ChildProcess daemon({... , machine.Environment()});
//   machine.Inject("cuMemCreate 1 error 2");
//   ...
//   EXPECT_EQ(machine.DeviceBytes(0), before);
//   EXPECT_THAT(machine.Violations(), IsEmpty());

#ifndef TESTS_FAKES_CONTROL_H_
#define TESTS_FAKES_CONTROL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/machine/machine_description.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

// A machine with `gpus` GPUs and default values.
MachineDescription MachineWithGpus(int gpus);
// The same, for a test that also runs on a real machine with fewer GPUs. There one real GPU stands
// for several. NCCL accepts two processes on one GPU if their NCCL_HOSTID differs: it takes them
// for processes of different machines.
MachineDescription GpusThatMayBeOne(int gpus);

// On a real machine, a process that needs something that only the fakes have exits with this
// status. It exits at once (quick_exit), since some event that it waits for may never happen.
inline constexpr int kNeedsFakes = 77;

// Thread-safe. The state folder is in /dev/shm; the destructor removes it. On a real machine
// (machine/real_gpus.h) Violations() is empty, and every other method exits with kNeedsFakes.
class FakeMachine {
 public:
  explicit FakeMachine(const MachineDescription& machine);
  // Uses the machine that this process's environment names. The destructor does not remove it.
  FakeMachine();
  ~FakeMachine();
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  // False on a real machine. There a test leaves out what only the fakes can tell, and goes on.
  bool fake() const { return folder_ != nullptr; }
  // "NAME=VALUE": puts a process on this machine.
  std::string Environment() const;
  // Adds a rule as fault_rules.h says. Processes see it at their next call.
  void Inject(const std::string& rule);
  // Removes all rules. Calls that hang continue.
  void ClearFaults();

  // The number of calls of `function` so far, by all processes or by `pid`.
  std::uint64_t Calls(const std::string& function, int pid = 0) const;
  // The bytes that the kernels launched so far read and write, all together. Bytes that a kernel
  // both reads and writes count twice.
  std::uint64_t KernelBytes(int pid = 0) const;

  // Bytes that are allocated on a GPU, contexts included. Memory of a killed process counts only
  // while another process has it mapped or open.
  std::size_t DeviceBytes(std::uint32_t gpu) const;
  // The processes with a context on a GPU.
  std::vector<int> ContextsOn(std::uint32_t gpu) const;
  // Polls until DeviceBytes is `bytes`; false after `patience_ms`.
  bool AwaitDeviceBytes(std::uint32_t gpu, std::size_t bytes, int patience_ms) const;

  std::vector<std::string> Journal(const std::string& kind) const;
  // The undefined behaviour so far: races, use of freed memory, sticky errors.
  std::vector<std::string> Violations() const;
  // Waits for a line of `kind` that contains `text`; false after `patience_ms`.
  bool AwaitJournal(const std::string& kind, const std::string& text, int patience_ms) const;

 private:
  void PublishFaults();
  StateFolder& folder() const;

  bool owned_ = false;
  std::string path_;
  std::unique_ptr<StateFolder> folder_;  // null on a real machine
  std::string faults_;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CONTROL_H_
