#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr auto kRight = TextTable::Align::kRight;

std::string Versions(const v1::CudaStatus& cuda) {
  if (cuda.driver_version().empty()) {
    return absl::StrCat("no GPUs: ", Printable(cuda.driver_error()), "\n");
  }
  const std::string nccl =
      cuda.nccl_version().empty()
          ? absl::StrCat("no NCCL, so that a job's ranks here must share one GPU: ",
                         Printable(cuda.nccl_error()))
          : absl::StrCat("NCCL ", Printable(cuda.nccl_version()));
  const std::string gate =
      cuda.gate().empty() ? "" : absl::StrCat(", gate ", Printable(cuda.gate()));
  return absl::StrCat("driver for CUDA ", Printable(cuda.driver_version()), ", ", nccl, gate,
                      ", arenas on GPUs ", FormatBytes(cuda.arena_bytes()), "\n");
}

absl::string_view SharingName(v1::GpuSharing sharing) {
  switch (sharing) {
    case v1::GPU_SHARING_TIME_SLICED:
      return "time-sliced";
    case v1::GPU_SHARING_MPS:
      return "MPS";
    default:
      return "unknown";
  }
}

TextTable Gpus(const v1::CudaStatus& cuda) {
  TextTable table({{"GPU"}, {"NAME"}, {"MEMORY", kRight}, {"FREE", kRight}, {"OVERLAP"}});
  for (const v1::GpuStatus& gpu : cuda.gpus()) {
    table.AddRow({gpu.uuid(), gpu.name(), FormatBytes(gpu.memory_bytes()),
                  gpu.has_free_bytes() ? FormatBytes(gpu.free_bytes()) : "-",
                  std::string(SharingName(gpu.sharing()))});
  }
  return table;
}

absl::string_view StateName(v1::WorkerState state) {
  switch (state) {
    case v1::WORKER_STATE_STARTING:
      return "starting";
    case v1::WORKER_STATE_RUNNING:
      return "running";
    case v1::WORKER_STATE_FAILED:
      return "FAILED";
    default:
      return "unknown";
  }
}

TextTable Workers(const v1::CudaStatus& cuda) {
  TextTable table({{"WORKER"},
                   {"JOB"},
                   {"USER", kRight},
                   {"GPU"},
                   {"STATE"},
                   {"RESTARTS", kRight},
                   {"ARENAS", kRight},
                   {"STAGING", kRight},
                   {"CONTEXT", kRight},
                   {"NCCL", kRight}});
  for (const v1::WorkerStatus& worker : cuda.workers()) {
    table.AddRow({worker.pid() == 0 ? "-" : absl::StrCat(worker.pid()), worker.job_id(),
                  absl::StrCat(worker.uid()), worker.gpu(), std::string(StateName(worker.state())),
                  absl::StrCat(worker.restarts()), FormatBytes(worker.arena_bytes()),
                  FormatBytes(worker.staging_bytes()),
                  worker.has_context_bytes() ? FormatBytes(worker.context_bytes()) : "-",
                  FormatBytes(worker.nccl_bytes())},
                 worker.state() == v1::WORKER_STATE_FAILED ? 1e9 : worker.restarts());
    if (!worker.last_failure().empty()) {
      table.AddNote(absl::StrCat("  last failure: ", worker.last_failure()));
    }
    if (worker.legacy_arenas() > 0) {
      table.AddNote(absl::StrCat("  ", worker.legacy_arenas(),
                                 " shared by legacy IPC: ", worker.why_legacy()));
    }
  }
  return table;
}

}  // namespace

std::vector<Section> GpuSections(const v1::GetStatusResponse& status) {
  if (!status.has_cuda()) return {};
  return {{"", TextTable({}), Versions(status.cuda())},
          {"GPUs", Gpus(status.cuda()), ""},
          {"workers", Workers(status.cuda()), ""}};
}

}  // namespace gradsync
