// A reducer that holds every reduction until a test completes it: in any order, at any moment, or
// never.

#ifndef TESTS_JOB_HELD_REDUCER_H_
#define TESTS_JOB_HELD_REDUCER_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/reduce/reducer.h"

namespace gradsync {

// Not thread-safe: for tests that run everything on their own thread. Does the arithmetic of
// float32 and float64 itself, one element after the other in the order of the buffers.
class HeldReducer final : public Reducer {
 public:
  // `clock` outlives this. `at_once`: nothing is held; Reduce() completes what it is given before
  // it returns, as HostReducer does with small buckets.
  explicit HeldReducer(const Clock* clock, bool at_once = false)
      : clock_(clock), at_once_(at_once) {}

  void Reduce(ReduceOperation* operation) override;

  // In the order of submission.
  const std::vector<ReduceOperation*>& held() const { return held_; }
  // Submissions so far.
  std::size_t submitted() const { return submitted_; }
  // True if a held reduction may read or write one of these bytes.
  bool Touches(const std::byte* data, std::size_t bytes) const;

  // `operation` must be held. The reduction, then done(), during which it is not held any more:
  // its last write is past.
  void Complete(ReduceOperation* operation);
  void CompleteAll();
  // `operation` must be held. done() without an arithmetic, as of an engine that has failed.
  void Fail(ReduceOperation* operation, const absl::Status& why);

  // The same arithmetic for whoever wants to know what comes out.
  template <typename T>
  static T Combined(const std::vector<T>& in_rank_order, double scale) {
    T sum = in_rank_order.front();
    for (std::size_t i = 1; i < in_rank_order.size(); ++i) sum += in_rank_order[i];
    return sum * static_cast<T>(scale);
  }

 private:
  void Release(ReduceOperation* operation);

  const Clock* const clock_;
  const bool at_once_;
  std::vector<ReduceOperation*> held_;
  std::size_t submitted_ = 0;
};

}  // namespace gradsync

#endif  // TESTS_JOB_HELD_REDUCER_H_
