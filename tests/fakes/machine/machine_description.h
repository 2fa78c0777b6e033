// The GPUs of the fake machine, and how the fakes behave on it. A test writes it into the state
// folder before any process loads a fake; it is constant from then on.

#ifndef TESTS_FAKES_MACHINE_MACHINE_DESCRIPTION_H_
#define TESTS_FAKES_MACHINE_MACHINE_DESCRIPTION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradsync::fakes {

inline constexpr std::size_t kMebibyte = std::size_t{1} << 20;

// The most GPUs of a machine.
inline constexpr std::size_t kMaxGpus = 16;

enum class ComputeMode { kDefault = 0, kProhibited = 2, kExclusiveProcess = 3 };  // CUcomputemode

struct GpuDescription {
  std::string uuid;  // "GPU-" or "MIG-" and 8-4-4-4-12 hexadecimal digits
  std::size_t memory_bytes = 1024 * kMebibyte;
  ComputeMode mode = ComputeMode::kDefault;
  // The values of the device's attributes of the same names.
  bool posix_handles = true;
  bool stream_memory_operations = true;
  int compute_capability = 90;  // major * 10 + minor
};

struct MachineDescription {
  std::vector<GpuDescription> gpus;
  bool mps = false;            // every context of the machine is an MPS client
  int driver_version = 13000;  // cuDriverGetVersion
  int nccl_version = 22809;    // ncclGetVersion
  // Device memory that a primary context and a communicator take.
  std::size_t context_bytes = 64 * kMebibyte;
  std::size_t communicator_bytes = 16 * kMebibyte;
  // Further memory that a communicator takes when it connects. It connects at its first collective;
  // if NCCL_RUNTIME_CONNECT is 0, when it is made.
  std::size_t connection_bytes = 8 * kMebibyte;
  // Every operation of a stream starts late by a random time up to this. The time depends on the
  // seed, the process's number of queues and the order of enqueues.
  int max_delay_us = 200;
  std::uint64_t seed = 1;
  // A nonblocking communicator launches at a random poll, at the latest at this one.
  int late_polls = 3;
  // If true, NCCL reports a lost process as ncclRemoteError, as over sockets. Otherwise the other
  // ranks spin, as over NVLink or shared memory.
  bool nccl_reports_lost_ranks = false;
  // On a real machine several of the GPUs may be one (isolated_test.h). FormatMachine leaves it
  // out.
  bool may_be_one = false;
};

// "GPU-00000000-0000-0000-0000-000000000001" for 1. On a real machine, the UUID of the GPU with
// that number.
std::string GpuUuid(int number);
std::string MigUuid(int number);

std::string FormatMachine(const MachineDescription& machine);
// Nullopt if `text` is not from FormatMachine.
std::optional<MachineDescription> ParseMachine(std::string_view text);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_MACHINE_DESCRIPTION_H_
