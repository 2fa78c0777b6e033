#include "tests/fakes/machine/machine_description.h"

#include <cstdio>
#include <sstream>

#include "tests/fakes/machine/real_gpus.h"

namespace gradsync::fakes {
namespace {

std::string Uuid(const char* kind, int number) {
  char text[64];
  std::snprintf(text, sizeof(text), "%s-00000000-0000-0000-0000-%012d", kind, number);
  return text;
}

}  // namespace

std::string GpuUuid(int number) {
  const std::vector<std::string>& real = RealGpus();
  const auto index = static_cast<std::size_t>(number);
  return index < real.size() ? real[index] : Uuid("GPU", number);
}
std::string MigUuid(int number) { return Uuid("MIG", number); }

std::string FormatMachine(const MachineDescription& machine) {
  std::ostringstream text;
  text << "machine " << machine.mps << ' ' << machine.driver_version << ' ' << machine.nccl_version
       << ' ' << machine.context_bytes << ' ' << machine.communicator_bytes << ' '
       << machine.max_delay_us << ' ' << machine.seed << ' ' << machine.late_polls << ' '
       << machine.nccl_reports_lost_ranks << ' ' << machine.connection_bytes << '\n';
  for (const GpuDescription& gpu : machine.gpus) {
    text << "gpu " << gpu.uuid << ' ' << gpu.memory_bytes << ' ' << static_cast<int>(gpu.mode)
         << ' ' << gpu.posix_handles << ' ' << gpu.stream_memory_operations << ' '
         << gpu.compute_capability << '\n';
  }
  return text.str();
}

std::optional<MachineDescription> ParseMachine(std::string_view text) {
  std::istringstream input{std::string(text)};
  MachineDescription machine;
  std::string word;
  input >> word >> machine.mps >> machine.driver_version >> machine.nccl_version >>
      machine.context_bytes >> machine.communicator_bytes >> machine.max_delay_us >> machine.seed >>
      machine.late_polls >> machine.nccl_reports_lost_ranks >> machine.connection_bytes;
  if (!input || word != "machine") return std::nullopt;
  while (input >> word) {
    GpuDescription gpu;
    int mode = 0;
    input >> gpu.uuid >> gpu.memory_bytes >> mode >> gpu.posix_handles >>
        gpu.stream_memory_operations >> gpu.compute_capability;
    if (!input || word != "gpu" || machine.gpus.size() == kMaxGpus) return std::nullopt;
    gpu.mode = static_cast<ComputeMode>(mode);
    machine.gpus.push_back(gpu);
  }
  return machine;
}

}  // namespace gradsync::fakes
