#include "daemon/peer/forwarded_ranks.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "absl/status/status.h"

namespace gradsync::daemon {

bool ForwardedRanks::Overdue(std::uint64_t now_ns) const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [now_ns](const Waiting& one) { return now_ns >= one.deadline_ns; });
}

template <typename Predicate>
std::vector<ForwardedRanks::Waiting> ForwardedRanks::TakeIf(Predicate predicate) {
  const auto found =
      std::stable_partition(waiting_.begin(), waiting_.end(), std::not_fn(predicate));
  std::vector<Waiting> taken(std::make_move_iterator(found),
                             std::make_move_iterator(waiting_.end()));
  waiting_.erase(found, waiting_.end());
  return taken;
}

std::vector<ForwardedRanks::Waiting> ForwardedRanks::TakeOverdue(std::uint64_t now_ns) {
  return TakeIf([now_ns](const Waiting& one) { return now_ns >= one.deadline_ns; });
}

std::vector<ForwardedRanks::Waiting> ForwardedRanks::TakeAbandoned() {
  return TakeIf([](const Waiting& one) { return one.sink->IsAbandoned(); });
}

void ForwardedRanks::Add(std::shared_ptr<ForwardingJob> rank) {
  --joining_;
  const std::uint64_t incarnation = rank->incarnation();
  ranks_[incarnation] = std::move(rank);
}

bool ForwardedRanks::InStep() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& entry) { return entry.second->layouts().InStep(); });
}

std::shared_ptr<ForwardingJob> ForwardedRanks::FindOverdueEnd(std::uint64_t now_ns,
                                                              bool excused) const {
  std::shared_ptr<ForwardingJob> overdue;
  for (const auto& [incarnation, rank] : ranks_) {
    if (rank->EndIsOverdue(now_ns, excused)) overdue = rank;
  }
  return overdue;
}

std::shared_ptr<ForwardingJob> ForwardedRanks::Find(std::uint64_t incarnation) const {
  const auto found = ranks_.find(incarnation);
  return found == ranks_.end() ? nullptr : found->second;
}

absl::StatusOr<ProxiedBucket> ForwardedRanks::FindBucket(std::uint64_t arena, std::uint32_t bucket,
                                                         std::uint64_t step) const {
  for (const auto& [incarnation, rank] : ranks_) {
    auto found = rank->layouts().BucketOf(arena, bucket, step);
    if (!absl::IsNotFound(found.status())) return found;
  }
  return absl::NotFoundError("no rank has the arena");
}

std::set<std::uint64_t> ForwardedRanks::Incarnations() const {
  std::set<std::uint64_t> incarnations;
  for (const auto& [incarnation, rank] : ranks_) incarnations.insert(incarnation);
  return incarnations;
}

ForwardedRanks::Ranks ForwardedRanks::All() const {
  Ranks all;
  for (const auto& [incarnation, rank] : ranks_) all.push_back(rank);
  return all;
}

ForwardedRanks::Ranks ForwardedRanks::TakeAll() {
  Ranks all = All();
  ranks_.clear();
  return all;
}

}  // namespace gradsync::daemon
