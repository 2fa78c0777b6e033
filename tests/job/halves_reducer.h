// A reducer that reads and writes half a bucket at a time, when a test says so.

#ifndef TESTS_JOB_HALVES_REDUCER_H_
#define TESTS_JOB_HALVES_REDUCER_H_

#include <array>
#include <cstddef>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/reduce/reducer.h"
#include "tests/job/model_state.h"

namespace gradsync::daemon {

// Not thread-safe. Adds the first kHalves float64 elements, or the first 8 * kHalves bytes of
// UINT8, and leaves the bucket's padding alone.
class HalvesReducer final : public Reducer {
 public:
  static constexpr int kMoves = 2 * kHalves;  // first every half is read, then every half written

  struct Held {
    ReduceOperation* operation;
    int moves = 0;  // that are done
    std::array<Half, kHalves> results{};
  };

  // `clock` outlives this.
  explicit HalvesReducer(const Clock* clock) : clock_(clock) {}

  void Reduce(ReduceOperation* operation) override { held_.push_back({operation}); }

  // In the order of submission.
  const std::vector<Held>& held() const { return held_; }
  // The next move of held()[index]. After the last one the operation is done.
  void Move(std::size_t index);

 private:
  static Half Combined(const ReduceOperation& operation, int half);

  const Clock* const clock_;
  std::vector<Held> held_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_HALVES_REDUCER_H_
