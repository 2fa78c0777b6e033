// A reducer that holds every reduction until a test completes it, in any order and at any time.

#ifndef TESTS_JOB_HELD_REDUCER_H_
#define TESTS_JOB_HELD_REDUCER_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

// Not thread-safe: for tests that run everything on one thread. Adds float32, float64 and uint8
// itself, element by element, in the order of the buffers.
class HeldReducer final : public Reducer {
 public:
  // `clock` outlives this. With `at_once`, Reduce() completes the operation before it returns, as
  // HostReducer does for small buckets.
  explicit HeldReducer(const Clock* clock, bool at_once = false)
      : clock_(clock), at_once_(at_once) {}

  void Reduce(ReduceOperation* operation) override;

  // In the order of submission.
  const std::vector<ReduceOperation*>& held() const { return held_; }
  // Submissions so far.
  std::size_t submitted() const { return submitted_; }
  // True if a held reduction may read or write one of these bytes.
  bool Touches(const std::byte* data, std::size_t bytes) const;

  // Carries out `operation`, which must be held, then calls done(). During done() it is no longer
  // held, because its last write is past.
  void Complete(ReduceOperation* operation);
  void CompleteAll();
  // Fails `operation`, which must be held: calls done() without writing a result.
  void Fail(ReduceOperation* operation, const absl::Status& why);

  // The same arithmetic, for tests that compute the expected result.
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

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_HELD_REDUCER_H_
