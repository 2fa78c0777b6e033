#include "daemon/session/session.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/reduce/gpu_staging.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

// Memory of a job and its statistics for one bucket of one rank, roughly.
constexpr std::uint64_t kBytesPerBucket = 1024;

// The memfds of a layout: its arena, and its semaphores.
constexpr std::size_t kLayoutDescriptors = 2;

// GPU memory is allocated in pieces of this size.
constexpr std::uint64_t kGpuGranule = 2 << 20;

// Rounds up to granules. Cannot overflow: decode.cc bounds layouts.
constexpr std::uint64_t InGpuGranules(std::uint64_t bytes) {
  return (bytes + kGpuGranule - 1) / kGpuGranule * kGpuGranule;
}

// Adds job and rank to an error.
absl::Status WithRank(const absl::Status& why, const std::string& job, std::uint32_t rank) {
  ErrorDetails details = DetailsOf(why);
  if (details.reason.empty()) return why;
  details.fields.emplace_back(field::kJob.text(), job);
  details.fields.emplace_back(field::kRank.text(), absl::StrCat(rank));
  return MakeError(why.code(), details, why.message());
}

}  // namespace

Session::Session(SessionIdentity identity, const SessionLimits& limits,
                 std::shared_ptr<JobPort> job, std::shared_ptr<SessionSink> sink,
                 std::shared_ptr<HostArena> staging, ArenaQuota* quota, UserExecutor* executor,
                 const GpuMemory& gpus)
    : identity_(std::move(identity)),
      limits_(limits),
      job_(std::move(job)),
      sink_(std::move(sink)),
      staging_(std::move(staging)),
      quota_(quota),
      executor_(executor),
      gpus_(gpus),
      heard_ns_(identity_.opened_ns) {}

void Session::RegisterLayout(LayoutRequest request, Registered registered) {
  if (!request.device.empty() && gpus_.workers == nullptr) {
    registered(MakeError(absl::StatusCode::kUnimplemented, reason::kCudaUnavailable,
                         "this daemon has no workers for GPUs: keep the gradients in host memory",
                         {{field::kJob, job_->job_id()}, {field::kRank, rank()}}));
    return;
  }
  auto answer = [self = shared_from_this(),
                 place = Place{request.spec.name, request.device, request.mps,
                               /*counts=*/request.replaces == 0},
                 registered = std::move(registered)](absl::StatusOr<JobPort::Registration> agreed) {
    if (!agreed.ok()) return registered(agreed.status());
    auto layout = self->NewLayout(place, agreed->plan);
    if (layout.ok() && place.device.empty()) {
      return self->AllocateMemory(place, *std::move(agreed), *std::move(layout), registered);
    }
    const auto allocate = [self, place, agreed = *std::move(agreed), layout, registered] {
      auto created = layout.ok() ? layout : self->NewLayout(place, agreed.plan);
      self->AllocateMemory(place, agreed, std::move(created), registered);
    };
    if (layout.ok()) return self->AfterReleases(allocate);  // only then is a GPU's memory free
    // There is no room. Tries again after the turns that unmap released arenas: these still count.
    self->AfterReleases([self, allocate] { self->job_->releases().Run(allocate); });
  };
  job_->RegisterLayout(identity_.session(), std::move(request), std::move(answer));
}

void Session::AfterReleases(std::function<void()> work) {
  // The session's executor comes first: it frees ended sessions, and may use released memory.
  executor_->Run(identity_.process.tenant(),
                 [turns = job_->releases(), work = std::move(work)] { turns.Run(work); });
}

void Session::AllocateMemory(const Place& place, JobPort::Registration agreed,
                             absl::StatusOr<std::shared_ptr<Layout>> layout,
                             const Registered& registered) {
  if (!layout.ok()) return MemoryAllocated(std::move(agreed), layout.status(), registered);
  LayoutMemory& memory = (*layout)->memory;
  if (place.device.empty()) {
    auto arena = HostArena::Create(absl::StrCat("gradsync-", place.name), agreed.plan.arena_bytes);
    if (!arena.ok()) return MemoryAllocated(std::move(agreed), arena.status(), registered);
    memory.arena = HostArena::UnmapInTurns(*std::move(arena), job_->releases(), limits_.turn_bytes,
                                           (*layout)->charge);
    return MemoryAllocated(std::move(agreed), *std::move(layout), registered);
  }
  GpuArenaSpec spec;
  spec.bytes = agreed.plan.arena_bytes;
  auto reserved = gpus_.quota->Reserve(identity_.process.tenant(), InGpuGranules(spec.bytes));
  if (!reserved.ok()) return MemoryAllocated(std::move(agreed), reserved.status(), registered);
  spec.reservation = std::make_shared<const ArenaQuota::Reservation>(*std::move(reserved));
  spec.buckets = agreed.plan.buckets.size();
  spec.semaphores_fd = memory.semaphores->fd();
  if (identity_.process.pidfd != nullptr) spec.trainer_pidfd = identity_.process.pidfd->get();
  memory.mps = place.mps;
  for (const PlannedBucket& bucket : agreed.plan.buckets) {
    const DataType largest = StagingType(bucket.dtype, NcclWireType::kAuto);
    spec.staging_bytes = std::max(spec.staging_bytes, StagingBytes(largest, bucket.count));
  }
  const WorkerKey key{identity_.job_key, place.device, identity_.process.tenant(), job_->job_id(),
                      job_->coordinator()};
  GpuArena::Create(gpus_.workers, key, spec,
                   [self = shared_from_this(), layout = *std::move(layout), agreed,
                    registered](absl::StatusOr<std::shared_ptr<GpuArena>> arena) {
                     if (!arena.ok())
                       return self->MemoryAllocated(agreed, arena.status(), registered);
                     layout->memory.gpu = *std::move(arena);
                     self->on_gpu_.store(true, std::memory_order_relaxed);
                     self->MemoryAllocated(agreed, layout, registered);
                   });
}

void Session::MemoryAllocated(JobPort::Registration agreed,
                              absl::StatusOr<std::shared_ptr<Layout>> layout,
                              const Registered& registered) {
  if (!layout.ok()) {
    job_->RefuseLayout(identity_.session(), agreed.channel, layout.status());
    registered(WithRank(layout.status(), job_->job_id(), rank()));
    return;
  }
  {
    MutexLock lock(&mutex_);
    layouts_[agreed.channel] = *layout;
    last_channel_ = std::max(last_channel_, agreed.channel);
  }
  const Registration registration{agreed.channel, std::move(agreed.plan), (*layout)->memory};
  job_->KeepMemory(identity_.session(), registration.channel, *std::move(layout));
  registered(registration);
}

absl::StatusOr<std::shared_ptr<Session::Layout>> Session::NewLayout(const Place& place,
                                                                    const LayoutPlan& plan) {
  {
    MutexLock lock(&mutex_);
    for (auto it = layouts_.begin(); it != layouts_.end();) {
      it = it->second.expired() ? layouts_.erase(it) : std::next(it);
    }
    if (place.counts && layouts_.size() >= limits_.layouts) {
      return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                       absl::StrCat("a session may have ", limits_.layouts,
                                    " layouts (quota_layouts_per_session): release some, or raise "
                                    "the quota"));
    }
  }
  const std::uint64_t arena_bytes = place.device.empty() ? plan.arena_bytes : 0;
  // The daemon's own memory counts too: the semaphores, and the job's data of each bucket.
  auto reserved = quota_->Reserve(
      identity_.process.tenant(),
      arena_bytes + plan.buckets.size() * (sizeof(BucketSemaphore) + kBytesPerBucket));
  if (!reserved.ok()) return reserved.status();
  std::shared_ptr<void> descriptors;
  if (limits_.descriptors != nullptr) {
    auto taken = limits_.descriptors->Take(identity_.process.tenant(), kLayoutDescriptors);
    if (!taken.ok()) return taken.status();
    descriptors = *std::move(taken);
  }
  auto semaphores = SemaphorePage::Create(
      plan.buckets.size(),
      place.device.empty() ? SemaphorePage::Pages::kOfTrainer : SemaphorePage::Pages::kOfDaemon);
  if (!semaphores.ok()) return semaphores.status();
  auto layout = std::make_shared<Layout>();
  layout->memory.semaphores = *std::move(semaphores);
  layout->charge = std::make_shared<Charge>(Charge{*std::move(reserved), std::move(descriptors)});
  return layout;
}

std::vector<std::shared_ptr<Session::Layout>> Session::Layouts() const {
  std::vector<std::shared_ptr<Layout>> layouts;
  MutexLock lock(&mutex_);
  for (const auto& [channel, weak] : layouts_) {
    if (auto layout = weak.lock()) layouts.push_back(std::move(layout));
  }
  return layouts;
}

void Session::WorkerLost(const WorkerKey& key, const absl::Status& why) {
  for (const std::shared_ptr<Layout>& layout : Layouts()) {
    const std::shared_ptr<GpuArena>& gpu = layout->memory.gpu;
    if (gpu == nullptr || gpu->key() < key || key < gpu->key()) continue;
    End(WithRank(why, job_->job_id(), rank()));
    return;
  }
}

std::shared_ptr<Session::Layout> Session::Find(std::uint32_t channel) const {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  return found == layouts_.end() ? nullptr : found->second.lock();
}

absl::Status Session::ArenaMapped(std::uint32_t channel) {
  const std::shared_ptr<Layout> layout = Find(channel);
  if (layout == nullptr) {
    MutexLock lock(&mutex_);
    // The agreement failed while the message was on its way.
    if (channel >= 1 && channel <= last_channel_) return absl::OkStatus();
  }
  if (layout == nullptr || layout->mapping.exchange(true)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("ArenaMapped for channel ", channel,
                                  ", which is not assigned or is mapped already"));
  }
  MapLater(channel, layout);
  return absl::OkStatus();
}

void Session::MapLater(std::uint32_t channel, const std::shared_ptr<Layout>& layout) {
  // Weak, so that the turns end when the layout does: the job has released its memory.
  const std::weak_ptr<Layout> weak = layout;
  executor_->Run(identity_.process.tenant(), [self = shared_from_this(), channel, weak] {
    const std::shared_ptr<Layout> live = weak.lock();
    if (live != nullptr) self->MapNext(channel, live);
  });
}

void Session::MapNext(std::uint32_t channel, const std::shared_ptr<Layout>& layout) {
  const LayoutMemory& memory = layout->memory;
  RankMemory mapped{layout, nullptr, memory.semaphores, memory.gpu, 0};
  absl::Status status;
  if (memory.gpu == nullptr) {
    const absl::StatusOr<bool> accepted = memory.arena->AcceptNext(limits_.turn_bytes);
    if (accepted.ok() && !*accepted) return MapLater(channel, layout);
    status = accepted.status();
    if (status.ok()) status = memory.semaphores->Accept();
    mapped.data = memory.arena->data();
    mapped.bytes = memory.arena->bytes();
  }
  if (status.code() == absl::StatusCode::kFailedPrecondition) {
    status = MakeError(absl::StatusCode::kFailedPrecondition, reason::kArenaNotPopulated,
                       absl::StrCat("rank ", rank(), " sent ArenaMapped for channel ", channel,
                                    ", but ", status.message()),
                       {{field::kRank, rank()}, {field::kChannel, channel}});
  }
  if (status.ok()) status = job_->ArenaMapped(identity_.session(), channel, std::move(mapped));
  if (!status.ok()) End(status);
}

absl::StatusOr<StagingMemory> Session::Staging() {
  MutexLock lock(&mutex_);
  if (staging_->data() == nullptr) {
    const absl::Status mapped = staging_->Accept(HostArena::Faults::kLater);
    if (mapped.code() == absl::StatusCode::kFailedPrecondition) {
      return MakeError(absl::StatusCode::kFailedPrecondition, reason::kArenaNotPopulated,
                       absl::StrCat("rank ", rank(), ": staging memory: ", mapped.message()),
                       {{field::kRank, rank()}});
    }
    if (!mapped.ok()) return mapped;
  }
  return StagingMemory{staging_, staging_->data(), staging_->bytes()};
}

absl::Status Session::CheckLease(std::uint64_t now_ns) {
  const std::uint64_t heard_ns = heard_ns_.load(std::memory_order_relaxed);
  const std::uint64_t third_ns = limits_.lease_ns / 3;
  if (now_ns < heard_ns + third_ns) return absl::OkStatus();
  const std::uint64_t asked_ns = asked_ns_.load(std::memory_order_relaxed);
  if (asked_ns <= heard_ns) {
    // The first question since the last message.
    asked_ns_.store(now_ns, std::memory_order_relaxed);
    sink_->Queue(LeaseQuestionMessage{now_ns});
    sink_->Flush();
    return absl::OkStatus();
  }
  // The lease runs from the question. A daemon that was stopped itself asks first, and does not end
  // sessions whose messages it could not read.
  if (now_ns < asked_ns + limits_.lease_ns - third_ns) return absl::OkStatus();
  if (expired_.exchange(true, std::memory_order_relaxed)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kAborted, reason::kLeaseExpired,
      absl::StrCat(
          "its process answered nothing for ", (now_ns - heard_ns) / 1'000'000,
          " ms, longer than its lease; it is stopped or swapped out: join again, and raise "
          "gradsyncd's option lease if such stops are normal"),
      {{field::kJob, job_->job_id()}, {field::kRank, rank()}});
}

void Session::TellEnd(const absl::Status& why) {
  sink_->Queue(SessionEndMessage{why});
  sink_->Flush();
}

void Session::End(const absl::Status& why) { job_->Lose(identity_.session(), why); }

std::uint64_t Session::memory_bytes() const {
  std::uint64_t bytes = staging_->bytes();
  for (const std::shared_ptr<Layout>& layout : Layouts()) {
    if (layout->memory.arena != nullptr) bytes += layout->memory.arena->bytes();
  }
  return bytes;
}

std::uint64_t Session::gpu_bytes() const {
  std::uint64_t bytes = 0;
  for (const std::shared_ptr<Layout>& layout : Layouts()) {
    if (layout->memory.gpu != nullptr) bytes += layout->memory.gpu->bytes();
  }
  return bytes;
}

std::vector<Session::GpuUse> Session::gpu_uses() const {
  std::vector<GpuUse> uses;
  for (const std::shared_ptr<Layout>& layout : Layouts()) {
    const LayoutMemory& memory = layout->memory;
    if (memory.gpu != nullptr) uses.push_back({memory.gpu->key().device, memory.mps});
  }
  return uses;
}

}  // namespace gradsync::daemon
