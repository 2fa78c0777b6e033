#include "daemon/worker/cuda_arenas.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

absl::Status CudaArenas::Add(const worker::AddArena& add, std::vector<UniqueFd> descriptors,
                             worker::ArenaAdded* added, UniqueFd* exported) {
  auto memory = std::make_shared<CudaSessionMemory>();
  auto semaphores =
      CudaSemaphorePage::Register(context_->driver(), std::move(descriptors[0]), add.buckets());
  if (!semaphores.ok()) return semaphores.status();
  memory->semaphores = *std::move(semaphores);
  if (descriptors.size() == 2) memory->trainer = std::move(descriptors[1]);
  auto arena = CudaArena::Create(context_->driver(), context_->device().handle, add.bytes(),
                                 context_->memory_stream());
  if (!arena.ok()) return arena.status();
  memory->arena = *std::move(arena);

  added->set_bytes(memory->arena->bytes());
  if (memory->arena->sharing() == CudaSharing::kFileDescriptor) {
    auto fd = memory->arena->Export();
    if (!fd.ok()) return fd.status();
    *exported = *std::move(fd);
  } else {
    const auto handle = memory->arena->IpcHandle();
    if (!handle.ok()) return handle.status();
    added->set_ipc_handle(handle->data(), handle->size());
    added->set_why_legacy(memory->arena->why_legacy());
  }
  arenas_[add.arena()] = std::move(memory);
  return absl::OkStatus();
}

std::shared_ptr<CudaSessionMemory> CudaArenas::Find(std::uint64_t number) const {
  const auto found = arenas_.find(number);
  return found != arenas_.end() ? found->second : nullptr;
}

absl::StatusOr<std::shared_ptr<CudaSessionMemory>> CudaArenas::Remove(std::uint64_t call,
                                                                      std::uint64_t number) {
  const auto found = arenas_.find(number);
  if (found == arenas_.end()) return absl::NotFoundError(absl::StrCat("no arena ", number));
  std::shared_ptr<CudaSessionMemory> memory = std::move(found->second);
  arenas_.erase(found);
  removals_.push_back({call, memory});
  return memory;
}

std::vector<std::uint64_t> CudaArenas::FreeUntouched(const CudaLaunchQueue& launches) {
  const auto untouched = std::partition(
      removals_.begin(), removals_.end(),
      [&](const Removal& removal) { return launches.Touches(removal.memory.get()); });
  std::vector<std::uint64_t> calls;
  for (auto removal = untouched; removal != removals_.end(); ++removal) {
    if (removal->memory->arena->sharing() == CudaSharing::kLegacyIpc) {
      kept_.push_back(std::move(*removal));
    } else {
      calls.push_back(removal->call);
    }
  }
  removals_.erase(untouched, removals_.end());
  return calls;
}

std::vector<pollfd> CudaArenas::AwaitedTrainers() const {
  std::vector<pollfd> trainers;
  for (const Removal& removal : kept_) {
    trainers.push_back({removal.memory->trainer.get(), POLLIN, 0});
  }
  return trainers;
}

std::vector<std::uint64_t> CudaArenas::FreeOfEnded(absl::Span<const pollfd> trainers) {
  std::vector<std::uint64_t> calls;
  std::vector<Removal> still;
  for (std::size_t i = 0; i < trainers.size(); ++i) {
    if (trainers[i].revents == 0) {
      still.push_back(std::move(kept_[i]));
    } else {
      calls.push_back(kept_[i].call);
    }
  }
  kept_ = std::move(still);
  return calls;
}

void CudaArenas::Count(worker::Pong* memory) const {
  const auto count = [memory](const CudaArena& arena) {
    memory->set_arena_bytes(memory->arena_bytes() + arena.bytes());
    if (arena.sharing() != CudaSharing::kLegacyIpc) return;
    memory->set_legacy_arenas(memory->legacy_arenas() + 1);
    memory->set_why_legacy(arena.why_legacy());
  };
  for (const auto& [number, session] : arenas_) count(*session->arena);
  for (const Removal& removal : kept_) count(*removal.memory->arena);
}

}  // namespace gradsync::daemon
