// A node's bucket in a test of engines: its gradients and its results.

#ifndef TESTS_ENGINE_ENGINE_BUCKET_H_
#define TESTS_ENGINE_ENGINE_BUCKET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/engine/engine.h"
#include "tests/engine/event.h"

namespace gradsync::daemon {

// Element `i` of `node`, with any sign and a magnitude from 2^-8 to 2^8. With `short_mantissa` the
// value is exact in bfloat16 and float16.
double TestValue(std::uint32_t node, std::size_t i, bool short_mantissa);

class EngineBucket {
 public:
  // 16-bit types get values that they represent exactly, like the gradients of one local rank.
  EngineBucket(DataType dtype, std::size_t count, std::uint32_t node);
  EngineBucket(const EngineBucket&) = delete;
  EngineBucket& operator=(const EngineBucket&) = delete;

  Exchange* exchange() { return &exchange_; }
  // Waits for done() and returns its status. Nullopt if done() is not called in time.
  std::optional<absl::Status> Wait() { return done_->Wait(); }
  Event& done() { return *done_; }
  // Clears the results, so that the bucket can be submitted again.
  void Reset();

  // The results, in the work type.
  const std::vector<std::byte>& result() const { return result_; }
  double ResultAt(std::size_t i) const;
  // The number of elements that scatter has not written exactly once.
  std::size_t Unwritten() const;

 private:
  const std::size_t item_bytes_;
  Exchange exchange_;
  std::vector<std::byte> mine_;
  std::vector<std::byte> result_;
  std::vector<std::uint8_t> written_;
  std::unique_ptr<Event> done_;
};

// The expected result of element i: the sum in float32 (float64) in the order of the nodes. On a
// 16-bit wire, each addend and the sum are rounded to the wire type.
double ExpectedSum(DataType dtype, DataType wire, std::uint32_t nodes, std::size_t i);

// `value` rounded to `dtype`.
double Rounded(DataType dtype, double value);

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_ENGINE_BUCKET_H_
