#include "tests/fuzz/fuzzed_rank.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kMaxArenaBytes = std::size_t{1} << 20;

}  // namespace

absl::Status FuzzedRank::ArenaMapped(std::uint32_t channel) {
  for (const Arena& arena : arenas_) {
    if (arena.channel == channel) {
      return job_->ArenaMapped(session_, channel, arena.memory->Share());
    }
  }
  return absl::InvalidArgumentError("no arena");
}

absl::Status FuzzedRank::RegisterLayout(LayoutRequest request) {
  // A job of another node answers later; this session lives as long as the job.
  job_->RegisterLayout(session_, std::move(request),
                       [this](const auto& registration) { Registered(registration); });
  return absl::OkStatus();
}

void FuzzedRank::Registered(const absl::StatusOr<JobPort::Registration>& registration) {
  if (!registration.ok()) return;
  if (registration->plan.arena_bytes > kMaxArenaBytes) {
    job_->RefuseLayout(session_, registration->channel, absl::ResourceExhaustedError("quota"));
    return;
  }
  arenas_.push_back(
      {registration->channel, std::make_unique<TrainerMemory>(registration->plan.arena_bytes,
                                                              registration->plan.buckets.size())});
  job_->KeepMemory(session_, registration->channel, arenas_.back().memory->Share().arena);
}

bool FuzzedRank::Free() const {
  for (const Arena& arena : arenas_) {
    if (arena.memory->Shared()) return false;
  }
  return window_.use_count() == 1;
}

}  // namespace gradsync::daemon
