#include "daemon/peer/agent_layouts.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/job/done_word_turns.h"
#include "daemon/job/layout_set.h"
#include "daemon/worker/gpu_arena.h"

namespace gradsync::daemon {
namespace {

// So many skipped channels are remembered. A job has no more agreements at a time.
constexpr std::uint32_t kMaxSkippedChannels = 2 * kMaxLayouts;

// Whether launches by `plan` stay within the memory.
bool Holds(const RankMemory& memory, const LayoutPlan& plan) {
  const std::uint64_t bytes =
      memory.gpu == nullptr ? memory.bytes : GpuArena::Of(*memory.gpu).bytes();
  return bytes >= plan.arena_bytes && memory.semaphores != nullptr &&
         memory.semaphores->buckets() >= plan.buckets.size();
}

// A job may have layouts that this rank has released. Each entry takes time: of a layout with few
// buckets all done words are written at once.
absl::Status CheckNextSteps(const v1::LeaveDone& done) {
  const auto malformed = [](absl::string_view what) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("its LeaveDone names ", what));
  };
  const auto layouts = static_cast<std::size_t>(done.next_steps_size());
  if (layouts > 2 * kMaxLayouts) {
    return malformed(absl::StrCat(layouts, " layouts; ", 2 * kMaxLayouts, " allowed"));
  }
  std::set<std::uint32_t> seen;
  for (const v1::NextStep& next : done.next_steps()) {
    if (!seen.insert(next.channel()).second) {
      return malformed(absl::StrCat("channel ", next.channel(), " twice"));
    }
    if (next.step() == 0) return malformed(absl::StrCat("step 0 of channel ", next.channel()));
  }
  return absl::OkStatus();
}

}  // namespace

bool SameBuckets(const LayoutPlan& plan, const v1::LayoutAssigned& assigned) {
  if (plan.arena_bytes != assigned.arena_bytes() ||
      plan.buckets.size() != static_cast<std::size_t>(assigned.buckets_size())) {
    return false;
  }
  for (std::size_t i = 0; i < plan.buckets.size(); ++i) {
    const v1::Bucket& other = assigned.buckets(static_cast<int>(i));
    if (plan.buckets[i].count != other.count() || plan.buckets[i].offset != other.offset() ||
        static_cast<int>(plan.buckets[i].dtype) != other.dtype()) {
      return false;
    }
  }
  return true;
}

// ---- The life of a layout

absl::Status AgentLayouts::Assign(const v1::LayoutAssigned& assigned, std::uint32_t replaces,
                                  LayoutPlan plan,
                                  std::shared_ptr<ArenaQuota::Reservation> charge) {
  // Never more: the spec takes more than its plan.
  if (charge != nullptr && charge->bytes() > BytesOf(plan)) (void)charge->Resize(BytesOf(plan));
  MutexLock lock(&mutex_);
  if (ended_) return absl::OkStatus();
  if (!TakeNumberLocked(assigned.channel())) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, reason::kMalformed,
        absl::StrCat("it assigned channel ", assigned.channel(), " to a layout of rank ", rank_,
                     ", but the number is used already"));
  }
  Layout& layout = layouts_[assigned.channel()];
  layout.request_id = assigned.request_id();
  layout.replaces = replaces;
  layout.plan = std::move(plan);
  layout.charge = std::move(charge);
  return absl::OkStatus();
}

bool AgentLayouts::TakeNumberLocked(std::uint32_t channel) {
  if (channel <= last_channel_) return skipped_channels_.erase(channel) > 0;
  const std::uint32_t lowest = channel - std::min(channel - 1, kMaxSkippedChannels);
  for (std::uint32_t skipped = std::max(last_channel_ + 1, lowest); skipped < channel; ++skipped) {
    skipped_channels_.insert(skipped);
  }
  while (skipped_channels_.size() > kMaxSkippedChannels) {
    skipped_channels_.erase(skipped_channels_.begin());
  }
  last_channel_ = channel;
  return true;
}

void AgentLayouts::KeepMemory(std::uint32_t channel, std::shared_ptr<void> memory) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  if (found == layouts_.end()) {
    executor_->Run(user_, [memory = std::move(memory)] {});
  } else {
    found->second.kept = std::move(memory);
  }
}

absl::StatusOr<bool> AgentLayouts::Mapped(std::uint32_t channel, RankMemory memory) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  if (found == layouts_.end()) return false;
  Layout& layout = found->second;
  if (memory.arena != layout.kept || !Holds(memory, layout.plan)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank_, ": the memory that it has mapped for channel ",
                                  channel, " is not that of the channel's layout"),
                     {{field::kRank, rank_}, {field::kChannel, channel}});
  }
  layout.memory = std::move(memory);
  return true;
}

void AgentLayouts::Ready(std::uint32_t channel) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  if (found == layouts_.end()) return;
  const auto replaced = layouts_.find(found->second.replaces);
  if (found->second.replaces != 0 && replaced != layouts_.end()) EraseLocked(replaced);
}

void AgentLayouts::Failed(std::uint64_t request_id) {
  MutexLock lock(&mutex_);
  const auto found = std::find_if(layouts_.begin(), layouts_.end(), [&](const auto& entry) {
    return entry.second.request_id == request_id;
  });
  if (found != layouts_.end()) EraseLocked(found);
}

void AgentLayouts::Refuse(std::uint32_t channel) {
  MutexLock lock(&mutex_);
  layouts_.erase(channel);
}

void AgentLayouts::ReleaseLayout(std::uint32_t channel) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  if (found == layouts_.end()) return;
  Layout& layout = found->second;
  layout.released = true;
  if (layout.begun_step <= layout.decided_step) EraseLocked(found);
}

void AgentLayouts::KeepStaging(StagingMemory staging) {
  MutexLock lock(&mutex_);
  if (!ended_) staging_ = std::move(staging);
}

void AgentLayouts::End() {
  MutexLock lock(&mutex_);
  ended_ = true;
  staging_ = StagingMemory{};
  while (!layouts_.empty()) EraseLocked(layouts_.begin());
}

void AgentLayouts::EraseLocked(Layouts::iterator layout) {
  Layout& ended = layout->second;
  if (ended.kept != nullptr || ended.memory.arena != nullptr) {
    executor_->Run(user_, [kept = std::move(ended.kept), memory = std::move(ended.memory)] {});
  }
  layouts_.erase(layout);
}

// ---- Its steps

void AgentLayouts::NoteStep(std::uint32_t channel, std::uint64_t step, std::size_t marks,
                            bool end) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  if (found == layouts_.end() || step < found->second.begun_step) return;
  Layout& layout = found->second;
  if (step > layout.begun_step) layout.marks = 0;
  layout.begun_step = step;
  layout.marks += marks;
  if (end) layout.ended_step = step;
}

void AgentLayouts::StepDone(const v1::StepDone& done) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(done.channel());
  if (found == layouts_.end()) return;
  Layout& layout = found->second;
  layout.decided_step = std::max(layout.decided_step, done.step());
  if (layout.released) {
    if (layout.begun_step <= layout.decided_step) EraseLocked(found);
    return;
  }
  if (done.verdict() == v1::VERDICT_COMPLETE || layout.memory.semaphores == nullptr) return;
  // A void step uses up its number. Waits for it are released, and see that it is void.
  layout.memory.semaphores->DeclareVoid(done.step());
  SignalAllLocked(done.channel(), &layout, done.step());
}

absl::Status AgentLayouts::Resume(const v1::LeaveDone& done) {
  if (absl::Status malformed = CheckNextSteps(done); !malformed.ok()) return malformed;
  MutexLock lock(&mutex_);
  for (const auto& next : done.next_steps()) {
    const auto found = layouts_.find(next.channel());
    if (found == layouts_.end()) continue;
    Layout& layout = found->second;
    layout.decided_step = std::max(layout.decided_step, next.step() - 1);
    if (layout.memory.semaphores == nullptr) continue;
    SignalAllLocked(next.channel(), &layout, next.step() - 1);
  }
  return absl::OkStatus();
}

void AgentLayouts::SignalAllLocked(std::uint32_t channel, Layout* layout, std::uint64_t step) {
  const std::size_t buckets = layout->plan.buckets.size();
  if (buckets <= kSignalledAtOnce) {
    for (std::size_t i = 0; i < buckets; ++i) layout->memory.semaphores->SignalDone(i, step);
    return;
  }
  OwedWords& owed = layout->owed;
  const bool under_way = owed.left > 0;
  owed.step = step;
  // `next` stays: if step after step is void, the last buckets have their turn, too.
  owed.left = buckets;
  owed.launched.assign(buckets, false);
  if (under_way) return;
  executor_->Run(user_, [self = shared_from_this(), channel] { self->SignalSome(channel); });
}

void AgentLayouts::SignalSome(std::uint32_t channel) {
  std::shared_ptr<SemaphorePage> page;
  std::size_t buckets = 0, first = 0, count = 0;
  bool more = false;
  {
    MutexLock lock(&mutex_);
    const auto found = layouts_.find(channel);
    if (found == layouts_.end() || found->second.owed.left == 0) return;
    OwedWords& owed = found->second.owed;
    page = found->second.memory.semaphores;
    buckets = found->second.plan.buckets.size();
    first = owed.next;
    count = std::min(owed.left, kSignalsPerTurn);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bucket = (first + i) % buckets;
      if (!owed.launched[bucket]) page->SetDone(bucket, owed.step);
    }
    owed.next = (first + count) % buckets;
    owed.left -= count;
    more = owed.left > 0;
    if (!more) std::vector<bool>().swap(owed.launched);
  }
  // The long part: each one is a system call.
  for (std::size_t i = 0; i < count; ++i) page->WakeDone((first + i) % buckets);
  if (!more) return;
  executor_->Run(user_, [self = shared_from_this(), channel] { self->SignalSome(channel); });
}

void AgentLayouts::NoteLaunch(Layout* layout, std::size_t bucket, std::uint64_t step) {
  OwedWords& owed = layout->owed;
  if (owed.left == 0 || step <= owed.step || owed.launched[bucket]) return;
  // Not left out: on a GPU the launch may wait for the trainer's stream, which waits for this word.
  layout->memory.semaphores->SetDone(bucket, owed.step);
  owed.launched[bucket] = true;
}

bool AgentLayouts::InDoubt() const {
  MutexLock lock(&mutex_);
  return std::any_of(layouts_.begin(), layouts_.end(), [](const auto& entry) {
    const Layout& layout = entry.second;
    if (layout.ended_step > layout.decided_step) return true;
    return layout.memory.gpu != nullptr && layout.begun_step > layout.decided_step &&
           layout.marks >= layout.plan.buckets.size();
  });
}

bool AgentLayouts::InStep() const {
  MutexLock lock(&mutex_);
  return std::any_of(layouts_.begin(), layouts_.end(), [](const auto& entry) {
    return entry.second.begun_step > entry.second.decided_step;
  });
}

// ---- The coordinator's launches

absl::Status AgentLayouts::WrongLaunch(absl::string_view what) const {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kMalformed,
                   absl::StrCat("the coordinator launched on rank ", rank_, " ", what));
}

absl::StatusOr<AgentLayouts::LaunchMemory> AgentLayouts::MemoryOf(const v1::Launch& launch) {
  const auto dtype = static_cast<DataType>(launch.dtype());
  MutexLock lock(&mutex_);
  if (launch.channel() == 0) {
    const std::uint64_t item = launch.has_root_node() ? 1 : ItemSize(dtype);
    if (staging_.data == nullptr || item == 0 || launch.count() > staging_.bytes / item) {
      return WrongLaunch("more than its staging memory holds");
    }
    return LaunchMemory{staging_.data, staging_.keep, nullptr};
  }
  const auto found = layouts_.find(launch.channel());
  if (found == layouts_.end() || found->second.memory.data == nullptr ||
      launch.bucket() >= found->second.plan.buckets.size()) {
    return WrongLaunch(absl::StrCat("bucket ", launch.bucket(), " of channel ", launch.channel(),
                                    ", which it does not have"));
  }
  Layout& layout = found->second;
  const PlannedBucket& bucket = layout.plan.buckets[launch.bucket()];
  if (bucket.dtype != dtype || bucket.count != launch.count()) {
    return WrongLaunch(
        absl::StrCat("bucket ", launch.bucket(), ", which has another type or size"));
  }
  NoteLaunch(&layout, launch.bucket(), launch.number());
  return LaunchMemory{layout.memory.data + bucket.offset, layout.memory.arena,
                      layout.memory.semaphores};
}

absl::StatusOr<ProxiedBucket> AgentLayouts::BucketOf(std::uint64_t arena, std::uint32_t bucket,
                                                     std::uint64_t step) {
  MutexLock lock(&mutex_);
  for (auto& [channel, layout] : layouts_) {
    if (layout.memory.gpu == nullptr) continue;
    const GpuArena& gpu = GpuArena::Of(*layout.memory.gpu);
    if (gpu.number() != arena) continue;
    const std::vector<PlannedBucket>& buckets = layout.plan.buckets;
    if (bucket >= buckets.size()) {
      return WrongLaunch(
          absl::StrCat("bucket ", bucket, " of channel ", channel, ", which has ", buckets.size()));
    }
    const PlannedBucket& planned = buckets[bucket];
    NoteLaunch(&layout, bucket, step);
    return ProxiedBucket{gpu.worker().get(),
                         planned.dtype,
                         planned.count,
                         planned.offset,
                         layout.plan.VerdictOffset(step),
                         buckets.size(),
                         layout.memory.semaphores};
  }
  return absl::NotFoundError("");
}

}  // namespace gradsync::daemon
