// Launches that several participants carry out together: which are in flight, which participants
// still owe an answer, and what the answers add up to.
//
// A launch is one ReduceOperation that every participant receives, in one order for all. Each
// participant answers each launch once. The participants are nodes (NodeGroup) or workers
// (NcclLaunchScheduler).

#ifndef DAEMON_REDUCE_LAUNCH_LEDGER_H_
#define DAEMON_REDUCE_LAUNCH_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "daemon/reduce/gradient_stats.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

// A launch, with its result so far.
struct LaunchRecord {
  ReduceOperation* operation = nullptr;
  std::shared_ptr<void> owner;         // of the operation; kept alive as long as the launch
  ReduceTimes times;                   // the latest start and the latest finish of any answer
  absl::Status failure;                // the first one
  std::optional<GradientStats> stats;  // the first: every participant has the same result
  bool is_void = false;                // some participant's contribution was void
};

// One participant's answer to a launch. The participant no longer touches the launch's memory.
struct LaunchAnswer {
  absl::Status status;                 // not OK: the launch has failed
  std::optional<GradientStats> stats;  // nullopt: it has not measured the result
  bool is_void = false;
  ReduceTimes times;  // 0: unknown
};

// Sets the operation's results and calls its done(). Call it without a lock.
void Finish(const LaunchRecord& launch);

// Pure bookkeeping: calls no one. Not thread-safe: its owner guards it. Owns no operation and no
// participant. It knows a participant by its address.
class LaunchLedger {
 public:
  using Participant = const void*;

  // Begins a launch. Each of `participants` (at least one) then owes an answer to it. Returns its
  // number: 1, 2, ...
  std::uint64_t Begin(LaunchRecord launch, const std::vector<Participant>& participants);

  // Whether this participant has received the launch and has not answered it.
  bool Owes(Participant participant, std::uint64_t number) const;
  // The launches that this participant has not answered, in order.
  std::vector<std::uint64_t> OwedBy(Participant participant) const;

  // The participants that owe a launch to which the last answer came more than `limit_ns` ago. A
  // launch without an answer does not count, nor one whose answers do not say when they came.
  std::set<Participant> Late(std::uint64_t now_ns, std::uint64_t limit_ns) const;

  // Takes an answer that is owed. When all have answered the launch, removes it from the ledger and
  // returns it.
  std::optional<LaunchRecord> Answer(Participant participant, std::uint64_t number,
                                     const LaunchAnswer& answer);

  // True if no launch is in flight.
  bool empty() const { return in_flight_.empty(); }
  // The owners of the launches in flight, in order.
  std::vector<std::shared_ptr<void>> Owners() const;

 private:
  struct InFlight {
    LaunchRecord launch;
    std::set<Participant> owing;
  };

  std::uint64_t last_number_ = 0;
  std::map<std::uint64_t, InFlight> in_flight_;  // by number
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_LAUNCH_LEDGER_H_
