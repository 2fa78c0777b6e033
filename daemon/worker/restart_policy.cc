#include "daemon/worker/restart_policy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;
constexpr std::uint64_t kHealthyAfterNs = 300 * kSecondNs;
constexpr std::uint64_t kLongestPauseNs = 60 * kSecondNs;
constexpr std::uint64_t kRefusalHoldsNs = kSecondNs;

}  // namespace

absl::Status RestartPolicy::MayStart(std::uint64_t now_ns) const {
  if (now_ns >= next_start_ns_) return absl::OkStatus();
  if (refused_) return last_failure_;
  return MakeError(absl::StatusCode::kUnavailable, reason::kWorkerRestarting,
                   absl::StrCat("the GPU's worker has failed ", failures_, " times, last: ",
                                last_failure_.message(), "; it can start again in ",
                                (next_start_ns_ - now_ns) / kSecondNs + 1, " s"));
}

void RestartPolicy::Failed(std::uint64_t now_ns, const absl::Status& why) {
  if (started_ns_ != 0 && now_ns - started_ns_ >= kHealthyAfterNs) failures_ = 0;
  started_ns_ = 0;
  last_failure_ = why;
  refused_ = false;
  ++failures_;
  const std::uint32_t doublings = std::min(failures_ - 1, 7U);
  const std::uint64_t pause_ns =
      doublings == 0 ? 0 : std::min(kSecondNs << (doublings - 1), kLongestPauseNs);
  next_start_ns_ = now_ns + pause_ns;
}

void RestartPolicy::Refused(std::uint64_t now_ns, const absl::Status& why) {
  last_failure_ = why;
  refused_ = true;
  next_start_ns_ = now_ns + kRefusalHoldsNs;
}

}  // namespace gradsync::daemon
