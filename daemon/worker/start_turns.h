// Whose turn it is to start.

#ifndef DAEMON_WORKER_START_TURNS_H_
#define DAEMON_WORKER_START_TURNS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// At most `at_once` workers of a user, in each pod, start at a time. The others wait, and have
// their turns in the order in which they asked. Reason: a worker that starts keeps a core busy for
// a while. Without a limit, one user's starts could take the cores of the others.
//
// A worker is named by its incarnation; one that asks later has a higher number. Not thread-safe.
class StartTurns {
 public:
  explicit StartTurns(std::size_t at_once) : at_once_(at_once) {}

  // True: it is the worker's turn. False: End or EndOverdue returns it when its turn has come.
  bool Ask(const Tenant& user, std::uint64_t incarnation, std::uint64_t now_ns) {
    Turns& turns = turns_[user];
    const bool now = turns.begun_ns.size() < at_once_;
    if (now) {
      turns.begun_ns.emplace(incarnation, now_ns);
    } else {
      turns.waiting.insert(incarnation);
    }
    return now;
  }

  // The worker has started, or it cannot. Returns the one whose turn it is now, if one waits.
  // Idempotent.
  std::optional<std::uint64_t> End(const Tenant& user, std::uint64_t incarnation,
                                   std::uint64_t now_ns) {
    const auto found = turns_.find(user);
    if (found == turns_.end()) return std::nullopt;
    Turns& turns = found->second;
    std::optional<std::uint64_t> next;
    if (turns.begun_ns.erase(incarnation) > 0 && !turns.waiting.empty()) {
      next = *turns.waiting.begin();
      turns.waiting.erase(turns.waiting.begin());
      turns.begun_ns.emplace(*next, now_ns);
    }
    if (turns.begun_ns.empty()) turns_.erase(found);
    return next;
  }

  // Ends the turns that have lasted for longer than `limit_ns`: a worker that hangs must not keep
  // others waiting. Returns the workers whose turn it is now.
  std::vector<std::uint64_t> EndOverdue(std::uint64_t now_ns, std::uint64_t limit_ns) {
    std::vector<std::pair<Tenant, std::uint64_t>> overdue;
    for (const auto& [user, turns] : turns_) {
      for (const auto& [incarnation, begun_ns] : turns.begun_ns) {
        if (now_ns - begun_ns > limit_ns) overdue.emplace_back(user, incarnation);
      }
    }
    std::vector<std::uint64_t> next;
    for (const auto& [user, incarnation] : overdue) {
      if (const auto one = End(user, incarnation, now_ns)) next.push_back(*one);
    }
    return next;
  }

 private:
  struct Turns {
    std::map<std::uint64_t, std::uint64_t> begun_ns;  // by incarnation; never empty
    std::set<std::uint64_t> waiting;
  };

  const std::size_t at_once_;
  std::map<Tenant, Turns> turns_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_START_TURNS_H_
