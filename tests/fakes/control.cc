#include "tests/fakes/control.h"

#include <sched.h>
#include <stdlib.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "tests/fakes/machine/call_counts.h"
#include "tests/fakes/machine/device_memory.h"
#include "tests/fakes/machine/real_gpus.h"

namespace gradsync::fakes {

MachineDescription MachineWithGpus(int gpus) {
  MachineDescription machine;
  for (int number = 0; number < gpus; ++number) {
    GpuDescription gpu;
    gpu.uuid = GpuUuid(number);
    machine.gpus.push_back(gpu);
  }
  return machine;
}

MachineDescription GpusThatMayBeOne(int gpus) {
  MachineDescription machine = MachineWithGpus(gpus);
  machine.may_be_one = true;
  return machine;
}

FakeMachine::FakeMachine(const MachineDescription& machine) {
  char path[] = "/dev/shm/gradsync-fake-cuda-XXXXXX";
  if (mkdtemp(path) != nullptr) {
    path_ = path;
    // Processes of other users may use the machine too.
    std::error_code ignored;
    std::filesystem::permissions(path_, std::filesystem::perms::all, ignored);
    folder_ = StateFolder::Create(path_, machine);
  }
  owned_ = true;
  if (folder_ == nullptr) {
    std::perror("no fake machine in /dev/shm");
    std::abort();
  }
}

FakeMachine::FakeMachine() {
  if (!RealGpus().empty()) return;
  if (const char* const path = std::getenv(kStateVariable)) {
    path_ = path;
    folder_ = StateFolder::Open(path_);
  }
  if (folder_ == nullptr) {
    std::fprintf(stderr, "%s names no fake machine\n", kStateVariable);
    std::abort();
  }
}

FakeMachine::~FakeMachine() {
  folder_.reset();
  if (!owned_) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

StateFolder& FakeMachine::folder() const {
  if (folder_ == nullptr) {
    std::fflush(nullptr);
    std::quick_exit(kNeedsFakes);
  }
  return *folder_;
}

std::string FakeMachine::Environment() const { return std::string(kStateVariable) + "=" + path_; }

void FakeMachine::Inject(const std::string& rule) {
  faults_ += rule + "\n";
  PublishFaults();
}

void FakeMachine::ClearFaults() {
  faults_.clear();
  PublishFaults();
}

void FakeMachine::PublishFaults() {
  folder().WriteFile("faults", faults_);
  folder().board().fault_generation.fetch_add(1);
  FutexWakeAll(folder().board().fault_generation);
}

std::uint64_t FakeMachine::Calls(const std::string& function, int pid) const {
  return CallsOf(folder(), function, pid);
}

std::uint64_t FakeMachine::KernelBytes(int pid) const {
  return CallsOf(folder(), kKernelBytes, pid);
}

std::size_t FakeMachine::DeviceBytes(std::uint32_t gpu) const { return UsedBytes(folder(), gpu); }

std::vector<int> FakeMachine::ContextsOn(std::uint32_t gpu) const {
  std::vector<int> processes;
  for (const AllocationHeader& memory : LiveAllocations(folder(), gpu)) {
    if (memory.kind == MemoryKind::kContext) processes.push_back(memory.pid);
  }
  return processes;
}

bool FakeMachine::AwaitDeviceBytes(std::uint32_t gpu, std::size_t bytes, int patience_ms) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  while (DeviceBytes(gpu) != bytes) {
    if (std::chrono::steady_clock::now() > end) return false;
    sched_yield();
  }
  return true;
}

std::vector<std::string> FakeMachine::Journal(const std::string& kind) const {
  std::vector<std::string> texts;
  for (const JournalLine& line : folder().Journal()) {
    if (line.kind == kind) texts.push_back(line.text);
  }
  return texts;
}

std::vector<std::string> FakeMachine::Violations() const {
  return folder_ == nullptr ? std::vector<std::string>() : Journal(kViolation);
}

bool FakeMachine::AwaitJournal(const std::string& kind, const std::string& text,
                               int patience_ms) const {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(patience_ms);
  for (;;) {
    const std::uint32_t lines = folder().board().journal_lines.load();
    for (const std::string& line : Journal(kind)) {
      if (line.find(text) != std::string::npos) return true;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    FutexWait(folder().board().journal_lines, lines, static_cast<int>(left));
  }
}

}  // namespace gradsync::fakes
