#include "daemon/job/job_options.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace gradsync::daemon {

std::string FirstDifference(const JobOptions& before, const JobOptions& given) {
  std::string difference;
  // `text` makes an option readable.
  const auto compare = [&difference](absl::string_view what, const auto& had, const auto& has,
                                     const auto& text) {
    if (!difference.empty() || had == has) return;
    difference = absl::StrCat(what, " is ", text(has), ", but the ranks that joined before have ",
                              text(had));
  };
  const auto nccl_name = [](auto choice) {
    const std::string name = NcclName(choice);
    return name.empty() ? "auto" : name;
  };
  compare("divisor", before.divide_by_world, given.divide_by_world,
          [](bool world) { return world ? "world" : "live_ranks"; });
  compare("step_timeout_ms", before.step_timeout_ns, given.step_timeout_ns,
          [](std::uint64_t ns) { return ns / 1'000'000; });
  compare("on_rank_loss", before.on_rank_loss, given.on_rank_loss,
          [](OnRankLoss policy) { return policy == OnRankLoss::kHold ? "hold" : "abort"; });
  compare("hold_timeout_ms", before.hold_timeout_ns, given.hold_timeout_ns,
          [](std::uint64_t ns) { return ns / 1'000'000; });
  compare("state_source", before.state_source, given.state_source, [](StateSource source) {
    return source == StateSource::kSurvivor ? "survivor" : "trainer";
  });
  compare("nccl.max_ctas", before.nccl.max_ctas, given.nccl.max_ctas,
          [](std::uint32_t ctas) { return ctas; });
  compare("nccl.algorithm", before.nccl.algorithm, given.nccl.algorithm, nccl_name);
  compare("nccl.protocol", before.nccl.protocol, given.nccl.protocol, nccl_name);
  compare("nccl.wire_type", before.nccl.wire_type, given.nccl.wire_type, nccl_name);
  return difference;
}

}  // namespace gradsync::daemon
