#include "daemon/job/late_ranks.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/gradsync/duration_text.h"

namespace gradsync::daemon {
namespace {

// The largest number of groups that a notice names.
constexpr std::size_t kNamedGroups = 8;

}  // namespace

void LateRanks::Add(std::uint32_t rank, absl::string_view done) {
  if (members_[rank].state == RankState::kAbsent) done = "joined the job";
  if (members_[rank].state == RankState::kHeld) done = "come back after its loss";
  if (members_[rank].state == RankState::kLoading) done = "loaded the state of the model";
  auto group = std::find_if(groups_.begin(), groups_.end(),
                            [done](const auto& other) { return other.first == done; });
  if (group == groups_.end()) {
    more_groups_ = more_groups_ || groups_.size() == kNamedGroups;
    if (more_groups_) return;
    group = groups_.emplace(groups_.end(), std::string(done), RankList());
  }
  group->second.Add(rank);
}

std::string LateRanks::Text() const {
  std::vector<std::string> parts;
  const auto name = [this](std::uint32_t rank) { return members_.Name(rank); };
  for (const auto& [done, ranks] : groups_) {
    const bool one = ranks.count() == 1;
    parts.push_back(absl::StrCat(one ? "rank " : "ranks ", ranks.Text(name), one ? " has" : " have",
                                 " not ", done));
  }
  if (more_groups_) parts.push_back("...");
  return absl::StrJoin(parts, "; ");
}

void TellLateRanks(absl::string_view wait, absl::Duration waited, const LateRanks& late,
                   const std::vector<std::uint32_t>& waiting, Membership* members,
                   DeferredActions* actions) {
  if (late.empty()) return;
  const std::string hint = members->OtherTokenHint();
  std::string text = absl::StrCat(wait, " after ", DurationText(waited), ": ", late.Text(),
                                  hint.empty() ? "" : ".", hint);
  for (const std::uint32_t rank : waiting) {
    members->Send(rank, StillWaitingMessage{text}, actions);
  }
  actions->late.push_back(std::move(text));
}

bool LateNotice::Due(std::uint64_t now_ns, std::uint64_t wait, std::uint64_t part) {
  if (!begun_ || wait_ != std::make_pair(wait, part)) {
    begun_ = true;
    wait_ = {wait, part};
    since_ns_ = now_ns;
    next_ns_ = now_ns + kFirstNs;
    return false;
  }
  if (now_ns < next_ns_) return false;
  // A tick that came late does not shift the later ones.
  next_ns_ += kAgainNs * (1 + (now_ns - next_ns_) / kAgainNs);
  return true;
}

void LateNotice::Tell(std::uint64_t now_ns, absl::string_view wait, const LateRanks& late,
                      const std::vector<std::uint32_t>& waiting, Membership* members,
                      DeferredActions* actions) const {
  TellLateRanks(wait, absl::Nanoseconds(now_ns - since_ns_), late, waiting, members, actions);
}

}  // namespace gradsync::daemon
