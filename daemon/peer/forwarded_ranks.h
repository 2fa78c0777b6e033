// The local ranks of a job that another node coordinates, from their wait for the coordinator on.

#ifndef DAEMON_PEER_FORWARDED_RANKS_H_
#define DAEMON_PEER_FORWARDED_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/job/job_port.h"
#include "daemon/peer/forwarding_job.h"
#include "daemon/peer/worker_proxy_server.h"

namespace gradsync::daemon {

// A rank waits until the coordinator has answered, is then about to join, and is then forwarded
// until the coordinator or the link ends it: Wait? BeginJoin Add Remove.
//
// Externally synchronized: guarded by the link's lock. Shares the ranks with their sessions.
class ForwardedRanks {
 public:
  struct Waiting {
    JoinRequest request;
    std::shared_ptr<SessionSink> sink;
    std::function<void(absl::StatusOr<Joined>)> joined;
    std::uint64_t deadline_ns = 0;  // it waits for the coordinator until then
  };
  using Ranks = std::vector<std::shared_ptr<ForwardingJob>>;

  void Wait(Waiting waiting) { waiting_.push_back(std::move(waiting)); }
  bool waiting() const { return !waiting_.empty(); }
  std::vector<Waiting> TakeWaiting() { return std::exchange(waiting_, {}); }
  // The ranks whose deadline has passed.
  bool Overdue(std::uint64_t now_ns) const;
  std::vector<Waiting> TakeOverdue(std::uint64_t now_ns);
  // The ranks whose trainers' streams have ended.
  std::vector<Waiting> TakeAbandoned();

  // `ranks` more ranks are about to be added.
  void BeginJoin(std::size_t ranks = 1) { joining_ += ranks; }
  void Add(std::shared_ptr<ForwardingJob> rank);
  void Remove(std::uint64_t incarnation) { ranks_.erase(incarnation); }

  // No rank is forwarded.
  bool empty() const { return ranks_.empty(); }
  // No rank is forwarded or about to be.
  bool unused() const { return ranks_.empty() && joining_ == 0; }
  // A rank has begun a step whose verdict it does not know.
  bool InStep() const;
  // A rank whose session the coordinator should have ended. Null: there is none. Calls
  // ForwardingJob::EndIsOverdue() for every rank.
  std::shared_ptr<ForwardingJob> FindOverdueEnd(std::uint64_t now_ns, bool excused) const;
  // Null if there is none.
  std::shared_ptr<ForwardingJob> Find(std::uint64_t incarnation) const;
  // As AgentLayouts::BucketOf, of the rank that has the arena.
  absl::StatusOr<ProxiedBucket> FindBucket(std::uint64_t arena, std::uint32_t bucket,
                                           std::uint64_t step) const;
  std::set<std::uint64_t> Incarnations() const;
  Ranks All() const;
  Ranks TakeAll();

 private:
  template <typename Predicate>
  std::vector<Waiting> TakeIf(Predicate predicate);

  std::vector<Waiting> waiting_;
  std::size_t joining_ = 0;
  std::map<std::uint64_t, std::shared_ptr<ForwardingJob>> ranks_;  // by incarnation
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_FORWARDED_RANKS_H_
