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

absl::string_view LateRanks::DueOf(std::uint32_t rank) const {
  switch (members_[rank].state) {
    case RankState::kAbsent:
      return "joined the job";
    case RankState::kHeld:
      return "come back after its loss";
    case RankState::kLoading:
      return "loaded the state of the model";
    default:
      return "";
  }
}

void LateRanks::Add(std::uint32_t rank, absl::string_view done) {
  if (const absl::string_view due = DueOf(rank); !due.empty()) done = due;
  AddTo(
      rank, [done](const Group& group) { return group.done == done; },
      [done] {
        return Group{0, std::string(done), {}};
      });
}

void LateRanks::Add(std::uint32_t rank, std::uint64_t number,
                    absl::FunctionRef<std::string(std::uint64_t number)> done) {
  if (const absl::string_view due = DueOf(rank); !due.empty()) return Add(rank, due);
  AddTo(
      rank, [number](const Group& group) { return group.number == number; },
      [number, done] {
        return Group{number, done(number), {}};
      });
}

void LateRanks::AddTo(std::uint32_t rank, absl::FunctionRef<bool(const Group&)> pass,
                      absl::FunctionRef<Group()> make) {
  auto group = std::find_if(groups_.begin(), groups_.end(), pass);
  if (group == groups_.end()) {
    more_groups_ = more_groups_ || groups_.size() == kNamedGroups;
    if (more_groups_) return;
    group = groups_.insert(groups_.end(), make());
  }
  group->ranks.Add(rank);
}

std::string LateRanks::Text() const {
  std::vector<std::string> parts;
  const auto name = [this](std::uint32_t rank) { return members_.Name(rank); };
  for (const Group& group : groups_) {
    const bool one = group.ranks.count() == 1;
    parts.push_back(absl::StrCat(one ? "rank " : "ranks ", group.ranks.Text(name),
                                 one ? " has" : " have", " not ", group.done));
  }
  if (more_groups_) parts.push_back("...");
  return absl::StrJoin(parts, "; ");
}

void TellLateRanks(absl::string_view wait, absl::Duration waited, const LateRanks& late,
                   const std::vector<std::uint32_t>& waiting, Membership* members,
                   DeferredActions* actions) {
  if (late.empty()) return;
  const std::string hint = members->AbsenceHint();
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
