// The ranks of a job on other nodes, and how many ranks each node has in all jobs of its node
// group.

#ifndef DAEMON_PEER_COUNTED_RANKS_H_
#define DAEMON_PEER_COUNTED_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "daemon/peer/engine_epoch.h"
#include "daemon/peer/node_link.h"

namespace gradsync::daemon {

// How many ranks the node of each link has. A look costs the same for any number of ranks. Not
// thread-safe.
class RankCounts {
 public:
  std::size_t Of(const NodeLink* link) const {
    const auto found = counts_.find(link);
    return found == counts_.end() ? 0 : found->second;
  }

 private:
  friend class CountedRanks;
  void Add(const NodeLink* link) { ++counts_[link]; }
  void Remove(const NodeLink* link) {
    const auto found = counts_.find(link);
    if (--found->second == 0) counts_.erase(found);
  }

  std::unordered_map<const NodeLink*, std::size_t> counts_;  // none is 0
};

// The ranks of one job. Nothing else changes the counts. Not thread-safe.
class CountedRanks {
 public:
  // `counts` outlives it.
  explicit CountedRanks(RankCounts* counts) : counts_(counts) {}
  CountedRanks(const CountedRanks&) = delete;
  CountedRanks& operator=(const CountedRanks&) = delete;
  ~CountedRanks() { Clear(); }

  const LinkedRanks& all() const { return ranks_; }
  // The nodes, in the order of their first rank. Looks at all ranks only after a change.
  const NodeLinks& links() const {
    if (!links_.has_value()) {
      NodeLinks& links = links_.emplace();
      std::unordered_set<const NodeLink*> known;
      for (const auto& [rank, linked] : ranks_) {
        if (known.insert(linked.link.get()).second) links.push_back(linked.link);
      }
    }
    return *links_;
  }

  // The rank is on the node of `linked.link` from now on.
  void Put(std::uint32_t rank, LinkedRank linked) {
    counts_->Add(linked.link.get());
    LinkedRank& place = ranks_[rank];
    if (place.link != nullptr) counts_->Remove(place.link.get());
    place = std::move(linked);
    links_.reset();
  }
  // Forgets the ranks on the node of `link`.
  void Forget(const NodeLink* link) {
    for (auto it = ranks_.begin(); it != ranks_.end();) {
      it = it->second.link.get() == link ? Erase(it) : std::next(it);
    }
  }
  // Forgets all ranks.
  void Clear() {
    while (!ranks_.empty()) Erase(ranks_.begin());
  }

 private:
  LinkedRanks::iterator Erase(LinkedRanks::iterator rank) {
    counts_->Remove(rank->second.link.get());
    links_.reset();
    return ranks_.erase(rank);
  }

  RankCounts* const counts_;
  LinkedRanks ranks_;
  mutable std::optional<NodeLinks> links_;  // nullopt: not known since the last change
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_COUNTED_RANKS_H_
