#include "daemon/session/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync {
namespace {

// What a job and its statistics keep for one bucket of one rank, roughly.
constexpr std::uint64_t kBytesPerBucket = 1024;

}  // namespace

Session::Session(SessionIdentity identity, const SessionLimits& limits, std::shared_ptr<Job> job,
                 std::shared_ptr<SessionSink> sink, std::shared_ptr<HostArena> staging,
                 ArenaQuota::Reservation staging_reservation, ArenaQuota* quota, Executor* executor)
    : identity_(std::move(identity)),
      limits_(limits),
      job_(std::move(job)),
      sink_(std::move(sink)),
      staging_(std::move(staging)),
      staging_reservation_(std::move(staging_reservation)),
      quota_(quota),
      executor_(executor),
      heard_ns_(identity_.opened_ns) {}

absl::StatusOr<Session::Registration> Session::RegisterLayout(LayoutRequest request) {
  {
    MutexLock lock(&mutex_);
    if (registrations_ >= limits_.layouts) {
      return MakeError(absl::StatusCode::kResourceExhausted, "QUOTA",
                       absl::StrCat("a session may register ", limits_.layouts,
                                    " layouts (quota_layouts_per_session)"));
    }
    ++registrations_;
  }
  const std::string name = request.spec.name;
  auto agreed = job_->RegisterLayout(rank(), std::move(request));
  if (!agreed.ok()) return agreed.status();
  Registration registration{agreed->channel, std::move(agreed->plan), {}};
  const LayoutPlan& plan = registration.plan;

  ArenaQuota::Reservation reservation;
  const absl::Status created = CreateMemory(plan, name, &registration.memory, &reservation);
  if (!created.ok()) {
    job_->RefuseLayout(rank(), registration.channel, created);
    return created;
  }

  MutexLock lock(&mutex_);
  layouts_[registration.channel] = Layout{registration.memory, std::move(reservation), false};
  return registration;
}

absl::Status Session::CreateMemory(const LayoutPlan& plan, const std::string& name,
                                   LayoutMemory* memory, ArenaQuota::Reservation* reservation) {
  // The daemon's own memory counts too: semaphores, and what the job keeps per bucket.
  auto reserved = quota_->Reserve(
      identity_.peer.uid,
      plan.arena_bytes + plan.buckets.size() * (sizeof(BucketSemaphore) + kBytesPerBucket));
  if (!reserved.ok()) return reserved.status();
  auto arena = HostArena::Create(absl::StrCat("gradsync-", name), plan.arena_bytes);
  if (!arena.ok()) return arena.status();
  auto semaphores = SemaphorePage::Create(plan.buckets.size());
  if (!semaphores.ok()) return semaphores.status();
  *memory = {*std::move(arena), *std::move(semaphores)};
  *reservation = *std::move(reserved);
  return absl::OkStatus();
}

absl::Status Session::ArenaMapped(std::uint32_t channel) {
  LayoutMemory memory;
  {
    MutexLock lock(&mutex_);
    const auto found = layouts_.find(channel);
    if (found == layouts_.end() || found->second.mapping) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION",
                       absl::StrCat("ArenaMapped for channel ", channel,
                                    ", which is not assigned or is mapped already"));
    }
    found->second.mapping = true;
    memory = found->second.memory;
  }
  executor_->Run([self = shared_from_this(), channel, memory = std::move(memory)] {
    absl::Status status = memory.arena->CheckPopulated();
    if (!status.ok()) {
      self->End(
          MakeError(absl::StatusCode::kFailedPrecondition, "ARENA_NOT_POPULATED",
                    absl::StrCat("rank ", self->rank(), " sent ArenaMapped for channel ", channel,
                                 ", but ", status.message()),
                    {{"rank", absl::StrCat(self->rank())}, {"channel", absl::StrCat(channel)}}));
      return;
    }
    status = memory.arena->Map();
    if (status.ok()) {
      status = self->job_->ArenaMapped(
          self->rank(), channel, RankMemory{memory.arena, memory.arena->data(), memory.semaphores});
    }
    if (!status.ok()) self->End(status);
  });
  return absl::OkStatus();
}

absl::Status Session::CheckWhole(std::uint32_t channel, std::uint64_t step) const {
  std::shared_ptr<HostArena> arena;
  {
    MutexLock lock(&mutex_);
    const auto found = layouts_.find(channel);
    if (found == layouts_.end()) return absl::OkStatus();  // the job refuses it
    arena = found->second.memory.arena;
  }
  const absl::Status populated = arena->CheckPopulated();
  if (populated.ok()) return populated;
  return MakeError(absl::StatusCode::kFailedPrecondition, "ARENA_NOT_POPULATED",
                   absl::StrCat("rank ", rank(), ", step ", step, ": ", populated.message()),
                   {{"job", job_->identity().job_id},
                    {"rank", absl::StrCat(rank())},
                    {"channel", absl::StrCat(channel)},
                    {"step", absl::StrCat(step)}});
}

absl::Status Session::MarkReady(std::uint32_t channel, std::uint64_t step,
                                absl::Span<const std::uint32_t> buckets) {
  if (absl::Status whole = CheckWhole(channel, step); !whole.ok()) return whole;
  return job_->MarkReady(rank(), channel, step, buckets);
}

absl::Status Session::EndStep(std::uint32_t channel, std::uint64_t step,
                              absl::string_view used_map) {
  if (absl::Status whole = CheckWhole(channel, step); !whole.ok()) return whole;
  return job_->EndStep(rank(), channel, step, used_map);
}

absl::StatusOr<StagingMemory> Session::Staging(std::uint64_t bytes) {
  MutexLock lock(&mutex_);
  if (absl::Status populated = staging_->CheckPopulated(bytes); !populated.ok()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "ARENA_NOT_POPULATED",
                     absl::StrCat("rank ", rank(), ": staging memory: ", populated.message()),
                     {{"rank", absl::StrCat(rank())}});
  }
  if (!staging_mapped_) {
    if (absl::Status mapped = staging_->Map(0); !mapped.ok()) return mapped;
    staging_mapped_ = true;
  }
  return StagingMemory{staging_, staging_->data(), staging_->bytes()};
}

void Session::CheckLease(std::uint64_t now_ns) {
  const std::uint64_t heard_ns = heard_ns_.load(std::memory_order_relaxed);
  const std::uint64_t third_ns = limits_.lease_ns / 3;
  if (now_ns < heard_ns + third_ns) return;
  const std::uint64_t asked_ns = asked_ns_.load(std::memory_order_relaxed);
  if (asked_ns <= heard_ns) {
    // The first question of this silence.
    asked_ns_.store(now_ns, std::memory_order_relaxed);
    sink_->Queue(LeaseQuestionMessage{now_ns});
    sink_->Flush();
    return;
  }
  // Counted from the question: a daemon that was itself stopped asks before it judges.
  if (now_ns < asked_ns + limits_.lease_ns - third_ns) return;
  End(MakeError(absl::StatusCode::kAborted, "LEASE_EXPIRED",
                absl::StrCat("its process answered nothing for ", (now_ns - heard_ns) / 1'000'000,
                             " ms, longer than its lease; it is stopped or swapped out"),
                {{"job", job_->identity().job_id}, {"rank", absl::StrCat(rank())}}));
}

void Session::End(const absl::Status& why) { job_->Lose(rank(), identity_.incarnation, why); }

std::uint64_t Session::memory_bytes() const {
  MutexLock lock(&mutex_);
  std::uint64_t bytes = staging_->bytes();
  for (const auto& [channel, layout] : layouts_) bytes += layout.memory.arena->bytes();
  return bytes;
}

}  // namespace gradsync
