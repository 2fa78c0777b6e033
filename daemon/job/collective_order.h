// Whether the ranks begin the same collectives in the same order.
//
// A rank announces every collective that it begins, also one that does not go through the daemon.
// The first rank that announces its n-th collective decides what every rank's n-th one must be.
//
// Externally synchronized: guarded by the job's lock.

#ifndef DAEMON_JOB_COLLECTIVE_ORDER_H_
#define DAEMON_JOB_COLLECTIVE_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace gradsync::daemon {

class CollectiveOrder {
 public:
  // How many collectives are kept for the ranks that have not reached them. A rank that is further
  // behind is compared only from the first kept one on.
  static constexpr std::size_t kKept = 1024;

  explicit CollectiveOrder(std::uint32_t world_size) : begun_(world_size) {}

  // The collective with this number, as the first rank began it.
  struct Collective {
    std::uint64_t number = 0;  // from 1
    std::uint32_t rank = 0;
    std::string description;
  };
  // `rank` begins its next collective. If another rank has begun a different one with this number
  // before, returns that one; else nullopt.
  std::optional<Collective> Begin(std::uint32_t rank, absl::string_view description);
  // How many the rank has begun.
  std::uint64_t Begun(std::uint32_t rank) const { return begun_[rank]; }
  // The collective with this number, which some rank has begun, for people: "collective 3
  // (barrier)".
  std::string Describe(std::uint64_t number) const;
  // `rank` has finished, and begins no further collective.
  void Finish(std::uint32_t rank) { fewest_finished_ = std::min(fewest_finished_, begun_[rank]); }
  // True if some rank has begun a collective that a finished rank has not.
  bool AnyIsBeyondFinished() const { return newest_ > fewest_finished_; }
  // True if `rank` has begun a collective that a finished rank has not.
  bool IsBeyondFinished(std::uint32_t rank) const { return begun_[rank] > fewest_finished_; }
  // The first collective that `rank` has begun and `other` has not, for people; "" if there is
  // none.
  std::string BegunBeyond(std::uint32_t rank, std::uint32_t other) const;

 private:
  struct Entry {
    Collective collective;
    std::uint32_t ranks = 0;  // how many have begun it
  };
  std::vector<std::uint64_t> begun_;  // by rank: how many collectives
  std::uint64_t newest_ = 0;          // the most that any rank has begun
  // The fewest collectives that a finished rank has begun; the maximum if no rank has finished.
  std::uint64_t fewest_finished_ = std::numeric_limits<std::uint64_t>::max();
  std::deque<Entry> kept_;  // the last ones, up to newest_
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_COLLECTIVE_ORDER_H_
