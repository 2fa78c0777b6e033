// A job as its ranks' sessions see it. It is a Job if this node coordinates it, or a ForwardingJob
// (daemon/peer) if another node does.

#ifndef DAEMON_JOB_JOB_PORT_H_
#define DAEMON_JOB_JOB_PORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/job_key.h"
#include "daemon/job/job_options.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/layout_set.h"
#include "daemon/job/membership.h"
#include "daemon/job/operation_channel.h"
#include "daemon/job/rank_session.h"

namespace gradsync::v1 {
class OpenSession;
class SessionRequest;
}  // namespace gradsync::v1

namespace gradsync::daemon {

class Job;

// A validated message of a rank about a step, an operation or its leaving. It has two forms, and
// each kind of JobPort uses one: a Job makes `call`, and a ForwardingJob sends `wire` on. This is
// why the interface names Job. With a method for each message instead, ForwardingJob would have to
// encode again what the dispatch has just decoded.
struct RankMessage {
  const v1::SessionRequest* wire = nullptr;    // as it came
  absl::FunctionRef<absl::Status(Job*)> call;  // what the rank asks of the job
  StagingMemory staging;                       // of an operation; otherwise null
};

// Thread-safe. Shared by the sessions of its ranks. A call is ignored if its session has ended, or
// is no longer the rank's session.
class JobPort {
 public:
  virtual ~JobPort() = default;

  virtual const std::string& job_id() const = 0;
  // Address of the daemon that coordinates the job; empty if that is this daemon.
  virtual std::string coordinator() const { return ""; }

  struct Registration {
    std::uint32_t channel = 0;
    LayoutPlan plan;
  };
  using Registered = std::function<void(absl::StatusOr<Registration>)>;
  // Registers a layout for the rank. Calls `answer` once, before any message about the layout, or
  // never if the session ends first. A Job calls it at once. INVALID_ARGUMENT, FAILED_PRECONDITION
  // LAYOUT_MISMATCH, ALREADY_REGISTERED or RANKS_LEFT, RESOURCE_EXHAUSTED, UNIMPLEMENTED
  // LOSS_POLICY: the request is refused, and the session goes on. A rank that comes late to an
  // agreement that has failed gets the same failure, once.
  virtual void RegisterLayout(RankSession session, LayoutRequest request, Registered answer) = 0;

  // Keeps `memory`, which the rank has for this channel's layout. Releases it in the turns of
  // releases() when the layout is replaced, its agreement has failed, the rank has released it or
  // has exited, or the job has ended.
  virtual void KeepMemory(RankSession session, std::uint32_t channel,
                          std::shared_ptr<void> memory) = 0;
  // The turns in which the job drops its references to memory, and in which the ranks' arenas are
  // unmapped. The executor outlives the job, and all arenas of its ranks.
  virtual UserQueue releases() const = 0;

  // This rank has registered but gets no memory. The layout fails on every rank at once, before its
  // deadline. If the rank came back after a loss, only its own registration fails.
  virtual void RefuseLayout(RankSession session, std::uint32_t channel,
                            const absl::Status& why) = 0;

  // For all calls below: a Status that is not OK says how the rank has broken the protocol, and the
  // caller ends the rank's session with it (Lose). A job on another node ends the session itself,
  // later.

  // OK if RegisterLayout may replace the layout of `channel`.
  virtual absl::Status CheckReplaces(RankSession session, std::uint32_t channel) const = 0;
  virtual absl::Status ArenaMapped(RankSession session, std::uint32_t channel,
                                   RankMemory memory) = 0;
  // A Job makes the message's call. A ForwardingJob forwards the message as it came.
  virtual absl::Status Deliver(const RankMessage& message) = 0;

  // The session is lost or must end, because of `why` ("its process ended", a breach, ...). If the
  // rank has exited or finished, only this session ends. With policy `hold` only this session ends,
  // too, if the job can go on. Otherwise the job fails: every running step is void, and every other
  // session ends with ABORTED RANK_LOST.
  virtual void Lose(RankSession session, const absl::Status& why) = 0;

  // kLost if another session has the rank now.
  virtual RankState StateOf(RankSession session) const = 0;

  // The layouts that this session, which came after a loss, has to register. None in a job on
  // another node: such a job never holds a rank.
  virtual std::vector<CurrentLayout> CurrentLayouts(RankSession) const { return {}; }
  // True if the job would hold the rank if this session's process ended now.
  virtual bool WouldHold(RankSession) const { return false; }
};

// A rank that wants to join.
struct JoinRequest {
  JobKey key;
  PodId pod;  // of the rank's process; none: in no pod
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  JobOptions options;
  std::uint64_t incarnation = 0;  // of its session, on its node
  std::string coordinator;        // address of rank 0's daemon; empty: this daemon
  bool lacks_peers = false;       // a coordinator is named, but this daemon has no peer_listen
  std::uint64_t patience_ns = 0;  // how long the rank waits for that daemon
  // How many connections to that daemon have ended before its first message.
  std::uint32_t connections_lost = 0;
  std::string client;
  // The client's message, if `coordinator` is not empty; otherwise null.
  std::shared_ptr<const v1::OpenSession> message;
};

struct Joined {
  std::shared_ptr<JobPort> job;
  std::uint64_t generation = 0;
};

// Thread-safe. Its users do not own it.
class JobFinder {
 public:
  virtual ~JobFinder() = default;
  // Finds the rank's job and joins it. `joined` is called once, perhaps before this returns;
  // messages to `sink` may come before that call. Statuses as JobTable::Join; UNAVAILABLE
  // COORDINATOR_UNREACHABLE or DRAINING.
  virtual void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
                    std::function<void(absl::StatusOr<Joined>)> joined) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_PORT_H_
