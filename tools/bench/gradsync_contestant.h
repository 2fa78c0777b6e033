// A rank that joins the bench's daemon and averages one bucket.

#ifndef TOOLS_BENCH_GRADSYNC_CONTESTANT_H_
#define TOOLS_BENCH_GRADSYNC_CONTESTANT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "gradsync/client.h"
#include "tools/bench/contestant.h"

namespace gradsync::bench {

// In host memory.
class GradsyncContestant : public Contestant {
 public:
  explicit GradsyncContestant(const ContestantOptions& options) : options_(options) {}

  absl::Status SetUp(std::size_t bytes) override { return Join(bytes, ""); }
  std::byte* buffer() override { return static_cast<std::byte*>(layout_->bucket(kBucket).data); }
  absl::Status AllReduce(Turn* turn) override;
  absl::Status EndStep(Turn* turn) override;
  absl::Status TearDown() override;

 protected:
  static constexpr std::size_t kBucket = 0;

  // Joins a new job for each size, so that the memory of the last one is freed. `device` is the
  // UUID of the layout's GPU, or empty.
  absl::Status Join(std::size_t bytes, const std::string& device);

  const ContestantOptions& options() const { return options_; }
  Layout& layout() { return *layout_; }
  std::uint64_t step() const { return step_; }

 private:
  const ContestantOptions options_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Layout> layout_;
  std::uint64_t step_ = 0;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_GRADSYNC_CONTESTANT_H_
