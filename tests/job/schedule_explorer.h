// Runs every schedule of a system that makes choices: depth first, and each schedule from the
// beginning, so that no state is saved.

#ifndef TESTS_JOB_SCHEDULE_EXPLORER_H_
#define TESTS_JOB_SCHEDULE_EXPLORER_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace gradsync::daemon {

// Call order: (Repeat Choose* Next)*, until Next() says that there is no further schedule. A
// schedule must be a function of its choices.
class ScheduleExplorer {
 public:
  // States with the same `key` differ at most in their history. The first `histories` schedules
  // that reach a state continue from it; with kUnbounded, every schedule runs to its end. One
  // history is enough to make every choice in every state.
  static constexpr std::uint32_t kUnbounded = std::numeric_limits<std::uint32_t>::max();
  explicit ScheduleExplorer(std::uint32_t histories) : histories_(histories) {}

  // Takes the choices that this schedule shares with the last one, and returns their number.
  std::size_t Repeat() {
    depth_ = choices_.empty() ? 0 : choices_.size() - 1;
    return depth_;
  }

  // One of 0 .. options - 1; nullopt if enough other schedules have continued from here.
  std::optional<std::size_t> Choose(std::size_t options, std::uint64_t key) {
    if (depth_ < choices_.size()) return choices_[depth_++].taken;
    std::uint32_t& visits = visits_[key];
    if (visits == histories_) return std::nullopt;
    if (histories_ != kUnbounded || visits == 0) ++visits;
    choices_.push_back({0, options});
    ++depth_;
    return 0;
  }

  // Goes on to the next schedule; false if that was the last.
  bool Next() {
    ++schedules_;
    while (!choices_.empty() && ++choices_.back().taken == choices_.back().options) {
      choices_.pop_back();
    }
    return !choices_.empty();
  }

  // Schedules that have run so far.
  std::uint64_t schedules() const { return schedules_; }
  // Different states in which a choice was made.
  std::size_t states() const { return visits_.size(); }

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

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_SCHEDULE_EXPLORER_H_
