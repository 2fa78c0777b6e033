#include "daemon/rpc/cuda_status.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

void FillVersions(const worker::Started& started, v1::CudaStatus* out) {
  out->set_driver_version(
      absl::StrCat(started.driver_version() / 1000, ".", started.driver_version() % 1000 / 10));
  out->set_nccl_version(started.nccl_version());
  out->set_nccl_error(started.nccl_error());
}

// Finds or makes the entry of a device.
v1::GpuStatus* GpuOf(const worker::Device& device, v1::CudaStatus* out) {
  for (v1::GpuStatus& gpu : *out->mutable_gpus()) {
    if (gpu.uuid() == device.uuid()) return &gpu;
  }
  v1::GpuStatus* const gpu = out->add_gpus();
  gpu->set_uuid(device.uuid());
  gpu->set_name(device.name());
  gpu->set_memory_bytes(device.memory_bytes());
  gpu->set_sharing(device.mps() ? v1::GPU_SHARING_MPS : v1::GPU_SHARING_TIME_SLICED);
  return gpu;
}

}  // namespace

v1::CudaStatus CudaStatusOf(const absl::StatusOr<worker::Started>& found,
                            const std::vector<WorkerStatus>& workers) {
  v1::CudaStatus out;
  if (found.ok()) {
    FillVersions(*found, &out);
    for (const worker::Device& device : found->devices()) GpuOf(device, &out);
  } else {
    out.set_driver_error(std::string(found.status().message()));
  }
  for (const WorkerStatus& worker : workers) {
    if (!worker.open) continue;
    // The driver was installed after the daemon had looked for one.
    if (out.driver_version().empty()) {
      out.clear_driver_error();
      FillVersions(worker.started, &out);
    }
    for (const worker::Device& device : worker.started.devices()) {
      v1::GpuStatus* const gpu = GpuOf(device, &out);
      if (worker.memory.total_bytes() > 0) gpu->set_free_bytes(worker.memory.free_bytes());
    }
  }
  return out;
}

std::vector<std::string> MpsWarnings(const std::string& job_id, const v1::SessionStatus& rank,
                                     const v1::CudaStatus& cuda) {
  std::vector<std::string> warnings;
  for (const v1::GpuStatus& gpu : cuda.gpus()) {
    const auto differs = [&gpu](const v1::GpuUse& use) {
      return use.gpu() == gpu.uuid() && use.sharing() != gpu.sharing();
    };
    const auto use = std::find_if(rank.gpu_uses().begin(), rank.gpu_uses().end(), differs);
    if (use == rank.gpu_uses().end()) continue;
    const bool by_rank = use->sharing() == v1::GPU_SHARING_MPS;
    warnings.push_back(
        absl::StrCat("job ", job_id, " rank ", rank.rank(), ": only ",
                     by_rank ? "the rank's process" : "the daemon's worker", " uses ", gpu.uuid(),
                     " through MPS, so its kernels and those of ",
                     by_rank ? "the daemon's worker" : "the rank's process",
                     " take turns; start both with the same CUDA_MPS_PIPE_DIRECTORY"));
  }
  return warnings;
}

v1::WorkerStatus WorkerStatusOf(const WorkerStatus& worker) {
  v1::WorkerStatus out;
  out.set_job_id(worker.key.job_id);
  out.set_uid(worker.key.user.uid);
  out.set_gpu(worker.key.device);
  out.set_pid(worker.pid);
  out.set_state(worker.open                             ? v1::WORKER_STATE_RUNNING
                : worker.pid != 0 || worker.awaits_turn ? v1::WORKER_STATE_STARTING
                                                        : v1::WORKER_STATE_FAILED);
  out.set_restarts(worker.restarts);
  out.set_last_failure(worker.last_failure);
  out.set_arena_bytes(worker.memory.arena_bytes());
  out.set_staging_bytes(worker.memory.staging_bytes());
  if (worker.memory.context_bytes() > 0) out.set_context_bytes(worker.memory.context_bytes());
  out.set_nccl_bytes(worker.memory.nccl_bytes());
  out.set_legacy_arenas(worker.memory.legacy_arenas());
  out.set_why_legacy(worker.memory.why_legacy());
  return out;
}

}  // namespace gradsync::daemon
