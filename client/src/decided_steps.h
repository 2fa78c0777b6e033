// The steps of a layout that are decided, and the verdicts of the last ones.

#ifndef CLIENT_SRC_DECIDED_STEPS_H_
#define CLIENT_SRC_DECIDED_STEPS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/include/gradsync/client.h"

namespace gradsync::v1 {
class StepDone;
}

namespace gradsync::client {

struct StepVerdict {
  std::uint64_t step = 0;
  absl::Status status;  // why the step is void; OK: complete
  StepResult result;
};

// The status of a void step is that of the message. If the message does not say why the step is
// void, the status is OK, and the caller must set another one.
StepVerdict DecodeVerdict(const v1::StepDone& done, std::size_t parameters);

// EndStep.used_map: one bit per parameter; empty when every parameter is used.
std::string EncodeUsedMap(const std::vector<bool>& used);

// Thread-compatible.
class DecidedSteps {
 public:
  // `outstanding`: the most steps that a rank may have under way.
  explicit DecidedSteps(std::size_t outstanding) : outstanding_(outstanding) {}

  // The last decided step; 0: none.
  std::uint64_t last() const { return last_; }
  // Null if `step` is not decided, or its verdict is not kept any more.
  std::shared_ptr<const StepVerdict> Find(std::uint64_t step) const;

  // `verdict->step` is greater than last(). If the step is complete, only the last `outstanding`
  // verdicts are kept: this rank has ended the step, so it has seen the older ones.
  void Add(std::shared_ptr<const StepVerdict> verdict);
  // The steps up to `step` were decided without this rank.
  void SkipTo(std::uint64_t step);

 private:
  // Several, because other ranks may abandon further steps before this rank waits for the first.
  static constexpr std::size_t kKept = 8;

  const std::size_t outstanding_;
  std::uint64_t last_ = 0;
  // By step % kKept; null: none.
  std::array<std::shared_ptr<const StepVerdict>, kKept> verdicts_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DECIDED_STEPS_H_
