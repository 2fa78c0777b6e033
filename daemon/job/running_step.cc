#include "daemon/job/running_step.h"

#include <algorithm>
#include <utility>

namespace gradsync::daemon {

void UsedMap::Add(absl::string_view used_map) {
  ++maps_;
  if (used_map.empty()) {
    bits_.assign(bytes(), '\xff');
  } else {
    all_empty_ = false;
    bits_.resize(bytes(), '\0');
    for (std::size_t i = 0; i < bytes(); ++i) {
      bits_[i] = static_cast<char>(bits_[i] | used_map[i]);
    }
  }
  // Clears the bits that have no parameter.
  if (const std::size_t last_bits = parameters_ % 8; last_bits != 0) {
    bits_.back() = static_cast<char>(bits_.back() & ((1u << last_bits) - 1));
  }
}

std::string UsedMap::Union(std::uint32_t ranks) const {
  return all_empty_ || maps_ != ranks ? "" : bits_;
}

RunningStep::RunningStep(std::uint64_t number, std::size_t buckets, std::size_t ranks,
                         std::size_t parameters)
    : number_(number),
      buckets_(buckets),
      ready_(buckets * ranks),
      times_(buckets),
      ranks_(ranks),
      used_map_(parameters) {
  for (BucketTimes& times : times_) times.ready_ns.resize(ranks);
  for (Rank& rank : ranks_) rank.marked.resize(buckets);
}

void RunningStep::Begin(std::uint64_t deadline_ns) {
  if (phase_ != Phase::kIdle) return;
  phase_ = Phase::kRunning;
  deadline_ns_ = deadline_ns;
}

void RunningStep::Void(absl::Status why) {
  if (phase_ != Phase::kRunning) return;
  phase_ = Phase::kVoid;
  why_void_ = std::move(why);
}

void RunningStep::Confirm() {
  if (phase_ != Phase::kVoid) return;
  phase_ = Phase::kRunning;
  why_void_ = absl::OkStatus();
}

void RunningStep::Cut() {
  if (phase_ == Phase::kIdle) return;
  phase_ = Phase::kCut;
  why_void_ = absl::OkStatus();
}

void RunningStep::Suspend(std::uint64_t now_ns) {
  if (begun() && !suspended()) suspended_ns_ = now_ns;
}

void RunningStep::Resume(std::uint64_t now_ns) {
  if (!suspended()) return;
  deadline_ns_ += now_ns - *suspended_ns_;
  suspended_ns_.reset();
}

void RunningStep::Mark(RankSession session, std::size_t bucket, std::uint64_t now_ns) {
  Rank& rank = ranks_[session.rank];
  rank.incarnation = session.incarnation;
  rank.marked[bucket] = true;
  ++rank.marks;
  std::uint64_t& ready = Ready(bucket, session.rank);
  if (ready != 0) return;
  ready = session.incarnation;
  ++buckets_[bucket].ready_ranks;
  times_[bucket].ready_ns[session.rank] = now_ns;
  last_ready_ns_ = now_ns;
}

std::optional<std::uint32_t> RunningStep::GivePosition(std::uint32_t rank, Position position) {
  if (!position_rank_.has_value()) {
    position_rank_ = rank;
    ranks_[rank].position = position;
  }
  if (!(ranks_[*position_rank_].position == position)) return position_rank_;
  ranks_[rank].position = position;
  return std::nullopt;
}

void RunningStep::Lose(std::uint32_t rank) {
  ranks_[rank].incarnation = 0;
  if (ranks_[rank].ended) return;
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!Waiting(bucket) || Ready(bucket, rank) == 0) continue;
    Ready(bucket, rank) = 0;
    --buckets_[bucket].ready_ranks;
    times_[bucket].ready_ns[rank] = 0;
  }
  ranks_[rank].marked.assign(buckets_.size(), false);
  ranks_[rank].marks = 0;
  ranks_[rank].position.reset();
  if (position_rank_ != rank) return;
  const auto given = std::find_if(ranks_.begin(), ranks_.end(),
                                  [](const Rank& other) { return other.position.has_value(); });
  position_rank_.reset();
  if (given != ranks_.end()) position_rank_ = static_cast<std::uint32_t>(given - ranks_.begin());
}

bool RunningStep::HasGradientsOf(RankSession session) const {
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (Reduced(bucket)) continue;
    if (ReadySession(bucket, session.rank) == session.incarnation) return true;
  }
  return false;
}

bool RunningStep::HasGradientsOfEarlier(RankSession session) const {
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const std::uint64_t ready = ReadySession(bucket, session.rank);
    if (ready != 0 && ready != session.incarnation) return true;
  }
  return false;
}

bool RunningStep::NeedsAverage(RankSession session, std::size_t bucket) const {
  const Rank& rank = ranks_[session.rank];
  return rank.incarnation == session.incarnation && rank.marked[bucket] &&
         ReadySession(bucket, session.rank) != session.incarnation;
}

std::optional<std::size_t> RunningStep::FirstUnmarked(std::uint32_t rank) const {
  const std::vector<bool>& marked = ranks_[rank].marked;
  const auto first = std::find(marked.begin(), marked.end(), false);
  if (first == marked.end()) return std::nullopt;
  return static_cast<std::size_t>(first - marked.begin());
}

void RunningStep::Submitted(std::size_t bucket) {
  buckets_[bucket].state = State::kReducing;
  ++in_flight_;
}

void RunningStep::Done(std::size_t bucket, const ReduceTimes& times) {
  buckets_[bucket].state = State::kReduced;
  times_[bucket].start_ns = times.start_ns;
  times_[bucket].finish_ns = times.finish_ns;
  ++reduced_;
  --in_flight_;
}

}  // namespace gradsync::daemon
