// The links to the daemons that coordinate this node's other jobs: one for each job and address.

#ifndef DAEMON_PEER_COORDINATOR_LINK_TABLE_H_
#define DAEMON_PEER_COORDINATOR_LINK_TABLE_H_

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/growing_pause.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/job/job_port.h"
#include "daemon/peer/coordinator_link.h"
#include "daemon/peer/coordinator_list.h"
#include "daemon/peer/dialed_sockets.h"
#include "daemon/peer/peer_address.h"
#include "daemon/peer/user_rate.h"
#include "daemon/rpc/node_status_source.h"
#include "daemon/rpc/stream_count.h"

namespace gradsync::daemon {

// Thread-safe. Calls links and jobs without its lock, except to ask whether a link has ended, and
// why.
// Shares the links with their streams.
class CoordinatorLinkTable final : public JobFinder {
 public:
  struct Options {
    LinkContext link;
    PeerAddress own;  // the address that this daemon listens on
    // Used if a coordinator's address has no port: the nodes' daemons are configured alike.
    std::uint16_t default_port = 0;
    CoordinatorList coordinators;  // the ones that it may dial
    std::size_t quota_jobs_per_user = 0;
    std::shared_ptr<grpc::ChannelCredentials> credentials;
    std::string tls_name;                    // as in PeerOptions
    grpc::CompletionQueue* queue = nullptr;  // outlives the links
    std::function<void()> dialed;            // there is a link to tick
  };
  explicit CoordinatorLinkTable(Options options);

  // Joins the rank to the job at request.coordinator, which may be this daemon itself. Dials it if
  // there is no link. RESOURCE_EXHAUSTED QUOTA: the user has too many jobs that other nodes
  // coordinate, or is paused. UNAVAILABLE DRAINING: after one of the three calls below that end
  // links.
  void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
            std::function<void(absl::StatusOr<Joined>)> joined) override;

  // Forgets the links that have ended. Remembers for each user at which addresses this daemon
  // itself answered. Returns whether any link is left.
  bool DropEnded();
  // Ends the links whose coordinators do harm, and pauses their users: no coordinator is dialed for
  // them for a while.
  void Tick(std::uint64_t now_ns);

  // CoordinatorLink::EndIdle() and EndRanks() of every link. After the first call, Join() returns
  // `why`.
  bool EndIdle(const absl::Status& why);
  void EndRanks(const absl::Status& why);
  // Cancels and forgets every link, and lets no rank join.
  void Cancel();
  // The links' streams, including those of forgotten links.
  const StreamCount& streams() const { return streams_; }

  // For status.
  std::vector<RemoteJobSnapshot> RemoteJobs(RemoteJobFilter wanted);
  // How many engines the links have made.
  std::uint64_t engines_made();

 private:
  using Links = std::vector<std::shared_ptr<CoordinatorLink>>;

  std::shared_ptr<grpc::Channel> ChannelTo(const std::string& target, const Tenant& user,
                                           const std::shared_ptr<DialedSockets>& sockets);
  // Notes whether the link, which has ended, did harm.
  void NoteHarmLocked(CoordinatorLink* link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How long the user's pause still lasts; 0: there is none.
  std::uint64_t PauseLeftLocked(const Tenant& user) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What gRPC may hold of a user's coordinators, in bytes.
  std::size_t Quota() const;
  // Adds the links that it drops to `*ended`. Returns whether any is left.
  bool DropEnded(Links* ended);
  // True if the address is known to name this daemon. Does not dial it.
  bool IsOwn(const PeerAddress& address) const;
  // The user's links if they use up the quota; otherwise none.
  Links CrowdLocked(const Tenant& user) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // From now on no rank may join.
  void Refuse(const absl::Status& why);
  Links All();

  const Options options_;
  const std::shared_ptr<UserRate> dial_rate_, engine_rate_;
  StreamCount streams_;

  Mutex mutex_;
  std::map<std::pair<std::string, JobKey>, std::shared_ptr<CoordinatorLink>> links_
      ABSL_GUARDED_BY(mutex_);
  // What gRPC may hold for all links of a user.
  std::map<Tenant, grpc::ResourceQuota> quotas_ ABSL_GUARDED_BY(mutex_);
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);  // not OK: no rank may join any more
  // Users whose coordinators did harm.
  std::map<Tenant, GrowingPause> pauses_ ABSL_GUARDED_BY(mutex_);
  // Addresses at which this daemon itself answers, each with the user whose link has found out. A
  // user's coordinator may lie, so no other user relies on it.
  std::set<std::pair<Tenant, std::string>> selves_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_COORDINATOR_LINK_TABLE_H_
