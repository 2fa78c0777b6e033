// What a rank has said about the step that it is marking.

#ifndef CLIENT_SRC_OPEN_STEP_H_
#define CLIENT_SRC_OPEN_STEP_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "client/src/held_gradients.h"

namespace gradsync::client {

// A value: the next step is a new object. Thread-compatible. Legal order of the transitions:
//
//   (Mark | MarkUnused | Hold)* (End | Abandon)?
class OpenStep {
 public:
  OpenStep(std::size_t buckets, std::size_t parameters)
      : marked_(buckets), parameters_(parameters) {}

  // ---- Transitions

  // `bucket` is not marked.
  void Mark(std::size_t bucket);
  // `parameter` is not marked unused.
  void MarkUnused(std::size_t parameter);
  // Keeps the bytes of a gradient that was marked unused.
  void Hold(HeldGradient gradient) { held_.push_back(std::move(gradient)); }
  // Every bucket is marked.
  void End() { phase_ = Phase::kEnded; }
  void Abandon() { phase_ = Phase::kAbandoned; }

  // ---- State

  bool untouched() const { return marks_ == 0 && unused_count_ == 0 && phase_ == Phase::kMarking; }
  bool no_mark() const { return marks_ == 0; }
  bool ended() const { return phase_ == Phase::kEnded; }
  bool abandoned() const { return phase_ == Phase::kAbandoned; }

  bool marked(std::size_t bucket) const { return marked_[bucket]; }
  bool all_marked() const { return marks_ == marked_.size(); }
  // In order of their numbers.
  std::vector<std::size_t> unmarked() const;

  bool unused(std::size_t parameter) const { return !unused_.empty() && unused_[parameter]; }
  bool has_unused() const { return unused_count_ > 0; }
  // `used` of EndStep, but false for each parameter that was marked unused. One flag per parameter;
  // empty: all are used.
  std::vector<bool> Used(const std::vector<bool>& used) const;

  // Moves out the held gradients that no rank used. `used_by_some`: one flag per parameter, true if
  // some rank used it; empty if every parameter was used.
  std::vector<HeldGradient> TakeHeld(const std::vector<bool>& used_by_some);
  void DropHeld() { held_.clear(); }

 private:
  enum class Phase { kMarking, kEnded, kAbandoned };

  Phase phase_ = Phase::kMarking;
  std::vector<bool> marked_;  // by bucket
  std::size_t marks_ = 0;
  std::size_t parameters_;
  std::vector<bool> unused_;  // by parameter; empty: none
  std::size_t unused_count_ = 0;
  std::vector<HeldGradient> held_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_OPEN_STEP_H_
