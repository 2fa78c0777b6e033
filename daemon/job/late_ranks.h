// Tells ranks that wait for others which ranks are late, and what those have not done.

#ifndef DAEMON_JOB_LATE_RANKS_H_
#define DAEMON_JOB_LATE_RANKS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/membership.h"
#include "daemon/job/rank_list.h"

namespace gradsync::daemon {

// The late ranks of one wait, and what each has not done. Made for one notice; refers to the
// constructor's argument.
class LateRanks {
 public:
  explicit LateRanks(const Membership& members) : members_(members) {}

  // Adds a rank that has not done something. `done`: what, as in "registered it". If the rank has
  // not joined the job, or is held or loading, the text says that instead.
  void Add(std::uint32_t rank, absl::string_view done);
  // The same in a sequence of things. The rank has not done the one with this number, from 1 on.
  // `done` says what it is; called only once for each number that the text names.
  void Add(std::uint32_t rank, std::uint64_t number,
           absl::FunctionRef<std::string(std::uint64_t number)> done);
  bool empty() const { return groups_.empty(); }
  // "rank 1 has not joined the job; ranks 2, 3 have not registered it"; of bounded length.
  std::string Text() const;

 private:
  // The ranks that are late with one and the same thing.
  struct Group {
    std::uint64_t number = 0;  // of the thing in its sequence; 0: it is in none
    std::string done;
    RankList ranks;
  };

  // What the rank has not done if it has not joined, or is held or loading: "joined the job".
  // Otherwise empty.
  absl::string_view DueOf(std::uint32_t rank) const;
  // Adds the rank to the group for which `pass` is true. If there is none, adds it to a new group,
  // which `make` returns. If the text can name no more groups, only notes that there are more.
  void AddTo(std::uint32_t rank, absl::FunctionRef<bool(const Group&)> pass,
             absl::FunctionRef<Group()> make);

  const Membership& members_;
  std::vector<Group> groups_;  // no more than the text names
  bool more_groups_ = false;
};

// Tells the ranks in `waiting` which ranks are late, and logs it. Does nothing if no rank is late.
// `wait`: "layout 'model'". `waited`: for how long they have waited.
void TellLateRanks(absl::string_view wait, absl::Duration waited, const LateRanks& late,
                   const std::vector<std::uint32_t>& waiting, Membership* members,
                   DeferredActions* actions);

// Decides when to tell waiting ranks which ranks are late: 5 s after the wait began, and then again
// every 30 s. One object serves several waits, one after another. Two numbers name a wait; no later
// wait has the same two.
//
// Externally synchronized: guarded by the job's lock.
class LateNotice {
 public:
  static constexpr std::uint64_t kFirstNs = 5'000'000'000;
  static constexpr std::uint64_t kAgainNs = 30'000'000'000;

  // Called at each tick of a wait; the wait begins at the first one. True: tell the ranks now.
  bool Due(std::uint64_t now_ns, std::uint64_t wait, std::uint64_t part = 0);
  // TellLateRanks() about the present wait.
  void Tell(std::uint64_t now_ns, absl::string_view wait, const LateRanks& late,
            const std::vector<std::uint32_t>& waiting, Membership* members,
            DeferredActions* actions) const;

 private:
  bool begun_ = false;
  std::pair<std::uint64_t, std::uint64_t> wait_;
  std::uint64_t since_ns_ = 0;
  std::uint64_t next_ns_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_LATE_RANKS_H_
