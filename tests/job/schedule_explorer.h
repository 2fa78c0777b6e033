// Runs every schedule of a system that makes choices, each from the beginning: depth first, and
// without any state being saved.

#ifndef TESTS_JOB_SCHEDULE_EXPLORER_H_
#define TESTS_JOB_SCHEDULE_EXPLORER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace gradsync {

// Call order: (Choose* Next)*, until Next() says that there is no further schedule. A schedule must
// be a function of its choices.
class ScheduleExplorer {
 public:
  // A state that differs from another only by how it came about has the same `key`. From each,
  // at most `histories` schedules go on, the first ones that get there; without a bound, every
  // schedule there is runs to its end.
  static constexpr std::uint32_t kUnbounded = 0;
  explicit ScheduleExplorer(std::uint32_t histories) : histories_(histories) {}

  // One of 0 .. options - 1; nullopt if enough other schedules have gone on from here.
  std::optional<std::size_t> Choose(std::size_t options, std::uint64_t key) {
    if (depth_ < choices_.size()) return choices_[depth_++].taken;
    if (histories_ != kUnbounded && ++visits_[key] > histories_) return std::nullopt;
    choices_.push_back({0, options});
    ++depth_;
    return 0;
  }

  // Goes on to the next schedule; false if that was the last.
  bool Next() {
    ++schedules_;
    depth_ = 0;
    while (!choices_.empty() && ++choices_.back().taken == choices_.back().options) {
      choices_.pop_back();
    }
    return !choices_.empty();
  }

  // That have run so far.
  std::uint64_t schedules() const { return schedules_; }
  // True if the last choice, after the same ones, has been made in an earlier schedule too.
  bool replaying() const { return depth_ < choices_.size(); }

 private:
  struct Choice {
    std::size_t taken;
    std::size_t options;
  };

  const std::uint32_t histories_;
  std::vector<Choice> choices_;
  std::size_t depth_ = 0;
  absl::flat_hash_map<std::uint64_t, std::uint32_t> visits_;
  std::uint64_t schedules_ = 0;
};

}  // namespace gradsync

#endif  // TESTS_JOB_SCHEDULE_EXPLORER_H_
