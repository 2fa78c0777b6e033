// A node's bucket in a test of engines: what it hands in, and what it gets.

#ifndef TESTS_ENGINE_ENGINE_BUCKET_H_
#define TESTS_ENGINE_ENGINE_BUCKET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/engine/engine.h"
#include "tests/engine/event.h"

namespace gradsync {

// `node`'s element `i`: any sign, 2^-8 to 2^8, exact in bfloat16 and float16 if `short_mantissa`.
double TestValue(std::uint32_t node, std::size_t i, bool short_mantissa);

class EngineBucket {
 public:
  // 16-bit types get values that they hold exactly, as one local rank would hand in.
  EngineBucket(DataType dtype, std::size_t count, std::uint32_t node);
  EngineBucket(const EngineBucket&) = delete;
  EngineBucket& operator=(const EngineBucket&) = delete;

  Exchange* exchange() { return &exchange_; }
  // Waits for done(). Nothing if it does not come.
  std::optional<absl::Status> Wait() { return done_->Wait(); }
  Event& done() { return *done_; }
  // Forgets the results, to be submitted once more.
  void Reset();

  // In the work type.
  const std::vector<std::byte>& result() const { return result_; }
  double ResultAt(std::size_t i) const;
  // Elements that scatter has not written, or twice: 0 if all is well.
  std::size_t Unwritten() const;

 private:
  const std::size_t item_bytes_;
  Exchange exchange_;
  std::vector<std::byte> mine_;
  std::vector<std::byte> result_;
  std::vector<std::uint8_t> written_;
  std::unique_ptr<Event> done_;
};

// What all nodes must get for element i: float32 (float64) sums in the order of the nodes, rounded
// to the wire's type before and after if it has 16 bits.
double ExpectedSum(DataType dtype, DataType wire, std::uint32_t nodes, std::size_t i);

// `value` as `dtype` holds it.
double Rounded(DataType dtype, double value);

}  // namespace gradsync

#endif  // TESTS_ENGINE_ENGINE_BUCKET_H_
