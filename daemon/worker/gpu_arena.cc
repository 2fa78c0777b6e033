#include "daemon/worker/gpu_arena.h"

#include <fcntl.h>

#include <atomic>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"

namespace gradsync::daemon {
namespace {

std::uint64_t NextNumber() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

GpuArena::GpuArena(WorkerKey key, std::shared_ptr<WorkerPort> worker, std::uint64_t number)
    : key_(std::move(key)), worker_(std::move(worker)), number_(number) {}

void GpuArena::Create(WorkerSupervisor* workers, const WorkerKey& key, const GpuArenaSpec& spec,
                      Created created) {
  worker::Call call;
  worker::AddArena* const add = call.mutable_add_arena();
  const std::uint64_t number = NextNumber();
  add->set_arena(number);
  add->set_bytes(spec.bytes);
  add->set_buckets(static_cast<std::uint32_t>(spec.buckets));
  add->set_staging_bytes(spec.staging_bytes);
  // Shared, since a std::function must be copyable.
  const auto descriptors = std::make_shared<std::vector<UniqueFd>>();
  for (const int fd : {spec.semaphores_fd, spec.trainer_pidfd}) {
    if (fd < 0) continue;
    descriptors->emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (descriptors->back().valid()) continue;
    created(MakeError(absl::StatusCode::kResourceExhausted, reason::kOpenFiles,
                      "gradsyncd has as many open files as its limit allows, so there is no "
                      "descriptor for an arena on a GPU; raise LimitNOFILE of its unit (ulimit "
                      "-n)"));
    return;
  }
  workers->Ensure(
      key, [key, number, descriptors, reservation = spec.reservation, call = std::move(call),
            created = std::move(created)](absl::StatusOr<std::shared_ptr<WorkerProcess>> worker) {
        if (!worker.ok()) return created(worker.status());
        WorkerProcess* const process = worker->get();
        process->Call(call, std::move(*descriptors),
                      [key, number, reservation, worker = *std::move(worker),
                       created](absl::StatusOr<WorkerProcess::Reply> reply) {
                        if (!reply.ok()) return created(reply.status());
                        const worker::ArenaAdded& added = reply->message.arena_added();
                        std::shared_ptr<GpuArena> arena(new GpuArena(key, worker, number));
                        arena->reservation_ = reservation;
                        arena->bytes_ = added.bytes();
                        arena->ipc_handle_ = added.ipc_handle();
                        if (!reply->descriptors.empty()) {
                          arena->fd_ = std::move(reply->descriptors.front());
                        }
                        if (!added.why_legacy().empty()) {
                          LogLimited(LogLevel::kWarning, "GPU memory is shared by a legacy handle",
                                     {{"job", key.job_id},
                                      {"uid", key.user},
                                      {"device", key.device},
                                      {"why", added.why_legacy()}});
                        }
                        created(std::move(arena));
                      });
      });
}

std::shared_ptr<GpuArena> GpuArena::OfOtherNode(WorkerKey key, std::shared_ptr<WorkerPort> worker,
                                                std::uint64_t number) {
  return std::shared_ptr<GpuArena>(new GpuArena(std::move(key), std::move(worker), number));
}

GpuArena::~GpuArena() {
  worker::Call call;
  call.mutable_remove_arena()->set_arena(number_);
  // The worker keeps memory that is shared by an IPC handle until the trainer ends. Meanwhile this
  // reference keeps the worker from being idle: an idle worker is stopped, which frees the memory.
  const std::shared_ptr<WorkerPort> busy = ipc_handle_.empty() ? nullptr : worker_;
  // If the worker is lost, the memory is free already.
  worker_->Call(std::move(call), {},
                [reservation = std::move(reservation_), busy](const auto& /*reply*/) {});
}

}  // namespace gradsync::daemon
