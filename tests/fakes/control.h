// A fake machine with GPUs for one test, and the test's view of it: faults, counters, the journal,
// device memory. tests/fakes/README.md says what the fakes model.
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

// A machine with `gpus` GPUs, all defaults.
MachineDescription MachineWithGpus(int gpus);

// How a process ends that wants to see, on a real machine, what only fakes show: at once, by
// quick_exit, for what it waits for may never come.
inline constexpr int kNeedsFakes = 77;

// The state folder is made in /dev/shm and removed with the object. Thread-safe. On a real machine
// (machine/real_gpus.h) there are no violations to be seen, and anything else is kNeedsFakes.
class FakeMachine {
 public:
  explicit FakeMachine(const MachineDescription& machine);
  // The one that this process's environment names; it stays when the object goes.
  FakeMachine();
  ~FakeMachine();
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  // "NAME=VALUE" for processes that shall be on this machine.
  std::string Environment() const;
  // Adds a rule as fault_rules.h says. Processes see it at their next call.
  void Inject(const std::string& rule);
  // Takes all rules away; calls that hang go on.
  void ClearFaults();

  // How often `function` was called: by all processes so far, or by one.
  std::uint64_t Calls(const std::string& function, int pid = 0) const;

  // What lives on a GPU, contexts included; with SIGKILLed processes' memory gone as soon as
  // nobody else has it mapped or open.
  std::size_t DeviceBytes(std::uint32_t gpu) const;
  // The processes with a context on a GPU.
  std::vector<int> ContextsOn(std::uint32_t gpu) const;
  // Looks until DeviceBytes is so many; false after `patience_ms`. Nobody tells when memory goes.
  bool AwaitDeviceBytes(std::uint32_t gpu, std::size_t bytes, int patience_ms) const;

  std::vector<std::string> Journal(const std::string& kind) const;
  // Undefined behaviour that was seen: races, freed memory, sticky errors.
  std::vector<std::string> Violations() const;
  // Waits until a line of `kind` that contains `text` has come; false after `patience_ms`.
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
