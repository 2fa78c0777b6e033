#include "daemon/session/session_table.h"

#include <openssl/sha.h>
#include <sys/random.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

constexpr uid_t kOverflowUid = 65534;
constexpr std::uint64_t kNonceLifeNs = 60'000'000'000;

std::string HashOf(const std::string& token) {
  if (token.empty()) return "";
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest);
  return std::string(reinterpret_cast<const char*>(digest), sizeof(digest));
}

// Whether they may be one process. All processes of other PID namespaces have pid 0.
bool MayBeSame(const ClientProcess& one, const ClientProcess& other) {
  return one.pid == other.pid && (one.pid != 0 || one.uid == other.uid);
}

}  // namespace

SessionTable::SessionTable(const SessionPolicy& policy, JobTable* jobs, ArenaQuota* quota,
                           UserExecutor* executor, const Clock* clock)
    : policy_(policy),
      jobs_(jobs),
      finder_(jobs),
      quota_(quota),
      executor_(executor),
      clock_(clock) {}

absl::StatusOr<std::uint64_t> SessionTable::Admit(const ClientProcess& process,
                                                  const OpenRequest& request) {
  if (process.uid == kOverflowUid && !policy_.allow_overflow_uid) {
    return MakeError(absl::StatusCode::kPermissionDenied, reason::kCredentials,
                     "user 65534 stands for every user of a foreign user namespace and is refused; "
                     "map the trainer's user, or set allow_overflow_uid");
  }
  if (policy_.require_token && request.token.empty()) {
    return MakeError(absl::StatusCode::kPermissionDenied, reason::kCredentials,
                     "this daemon requires a job token: set GRADSYNC_JOB_TOKEN in the trainers");
  }
  if (finder_ == jobs_ && request.world_size > policy_.quota_sessions_per_user) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("world_size ", request.world_size,
                     ": without peer_listen every rank is on this node, and "
                     "quota_sessions_per_user allows ",
                     policy_.quota_sessions_per_user,
                     " sessions: start fewer ranks or raise the quota. If ranks are on other "
                     "nodes, set gradsyncd's option peer_listen and the trainers' coordinator"));
  }
  MutexLock lock(&mutex_);
  if (draining_) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDraining,
                     "the daemon drains and takes no new session; join again when it is back");
  }
  std::size_t& of_user = per_user_[process.tenant()];
  if (of_user >= policy_.quota_sessions_per_user) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat(
            "user ", process.tenant().Text(), " has ", of_user,
            " sessions, as many as quota_sessions_per_user allows: end one, or raise the quota"));
  }
  ++of_user;
  return ++last_incarnation_;
}

void SessionTable::Open(const ClientProcess& process, const OpenRequest& request,
                        std::shared_ptr<SessionSink> sink, Opened opened) {
  const auto incarnation = Admit(process, request);
  if (!incarnation.ok()) return opened(incarnation.status());
  const auto refuse = [&](const absl::Status& why) {
    Note(process, why);
    opened(why);
  };
  if (request.options.Holds() && process.pidfd == nullptr) {
    return refuse(MakeError(
        absl::StatusCode::kUnimplemented, reason::kLossPolicy,
        absl::StrCat("job '", request.job_id, "', rank ", request.rank,
                     ": on_rank_loss=hold needs the kernel to say when this process ends, which it "
                     "does not for a process of another PID namespace before Linux 6.5; use abort"),
        {{field::kJob, request.job_id}, {field::kRank, request.rank}}));
  }
  auto reservation = quota_->Reserve(process.tenant(), policy_.staging_bytes);
  if (!reservation.ok()) return refuse(reservation.status());
  std::shared_ptr<void> descriptor;
  if (descriptors_ != nullptr) {
    auto taken = descriptors_->Take(process.tenant(), 1);
    if (!taken.ok()) return refuse(taken.status());
    descriptor = *std::move(taken);
  }
  auto created = HostArena::Create("gradsync-staging", policy_.staging_bytes);
  if (!created.ok()) return refuse(created.status());
  // Shared, because a deleter is copied.
  auto reserved = std::make_shared<ArenaQuota::Reservation>(*std::move(reservation));
  // The quotas count the memory and its descriptor until the memory is freed. The job may hold it
  // for longer than the session lives.
  HostArena* const arena = created->get();
  const std::shared_ptr<HostArena> staging(arena, [descriptor, reserved = std::move(reserved),
                                                   held = *std::move(created)](HostArena*) mutable {
    held.reset();
    reserved.reset();
  });
  JoinRequest join;
  join.key = JobKey{process.uid, request.job_id, HashOf(request.token)};
  join.pod = process.place.pod;
  join.rank = request.rank;
  join.world_size = request.world_size;
  join.options = request.options;
  if (join.options.step_timeout_ns == 0) join.options.step_timeout_ns = policy_.step_timeout_ns;
  join.incarnation = *incarnation;
  join.coordinator = request.coordinator;
  join.lacks_peers = finder_ == jobs_ && !request.coordinator.empty();
  join.patience_ns = request.patience_ns;
  join.client = request.client;
  join.message = request.message;
  EndIfProcessEnded(join);
  finder_->Join(join, sink,
                [this, process, join, sink, staging, hold = request.options.Holds(),
                 opened = std::move(opened)](absl::StatusOr<Joined> joined) {
                  const auto refuse = [&](const absl::Status& why) {
                    Note(process, why);
                    opened(why);
                  };
                  if (!joined.ok()) return refuse(joined.status());
                  auto session = std::make_shared<Session>(
                      SessionIdentity{process, join.incarnation, join.rank, join.client,
                                      clock_->NowNs(), joined->generation, join.key.Text(), hold},
                      SessionLimits{policy_.lease_ns, policy_.quota_layouts_per_session,
                                    descriptors_, policy_.turn_bytes},
                      std::move(joined->job), sink, staging, quota_, executor_, gpus_);
                  Note(process, session);
                  opened(std::move(session));
                });
}

void SessionTable::EndIfProcessEnded(const JoinRequest& join) {
  std::vector<std::shared_ptr<Session>> holders;
  for (std::shared_ptr<Session>& session : Sessions()) {
    const SessionIdentity& identity = session->identity();
    // Whatever its token: JobTable refuses a replacement with another one.
    if (identity.rank == join.rank && identity.process.uid == join.key.uid &&
        session->job().job_id() == join.key.job_id) {
      holders.push_back(std::move(session));
    }
  }
  for (const std::shared_ptr<Session>& holder : holders) {
    const ClientProcess& process = holder->identity().process;
    if (HasEnded(process, /*patience_ms=*/0)) End(holder, ProcessEndedError(process));
  }
}

void SessionTable::Note(const ClientProcess& process,
                        const absl::StatusOr<std::shared_ptr<Session>>& session) {
  MutexLock lock(&mutex_);
  if (session.ok()) {
    sessions_[(*session)->identity().incarnation] = *session;
    ++opened_;
  } else if (--per_user_[process.tenant()] == 0) {
    per_user_.erase(process.tenant());
  }
}

absl::StatusOr<Nonce> SessionTable::Offer(const Session& session,
                                          const std::vector<Descriptor>& descriptors) {
  Nonce nonce(kNonceBytes, '\0');
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    return absl::InternalError("getrandom failed");
  }
  const SessionIdentity& identity = session.identity();
  MutexLock lock(&mutex_);
  if (sessions_.find(identity.incarnation) == sessions_.end()) {
    return MakeError(
        absl::StatusCode::kAborted, reason::kSessionEnded,
        absl::StrCat("the session of rank ", identity.rank, " has ended: it is given no memory"),
        {{field::kRank, identity.rank}});
  }
  DropUselessOffersLocked(identity.incarnation);
  nonces_[identity.incarnation].push_back(nonce);
  Offered& offered = offers_[nonce];
  offered = {identity.process.uid, identity.process.pid, clock_->NowNs() + kNonceLifeNs, {}};
  for (const Descriptor& one : descriptors) offered.descriptors.emplace_back(one.owner, one.fd);
  return nonce;
}

void SessionTable::DropUselessOffersLocked(std::uint64_t incarnation) {
  const auto found = nonces_.find(incarnation);
  if (found == nonces_.end()) return;
  const std::uint64_t now_ns = clock_->NowNs();
  const auto is_useless = [this, now_ns](const Nonce& nonce) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto offer = offers_.find(nonce);
    if (offer == offers_.end()) return true;
    const auto& descriptors = offer->second.descriptors;
    const bool freed = std::any_of(descriptors.begin(), descriptors.end(),
                                   [](const auto& one) { return one.first.expired(); });
    if (!freed && now_ns <= offer->second.expires_ns) return false;
    offers_.erase(offer);
    return true;
  };
  std::vector<Nonce>& nonces = found->second;
  nonces.erase(std::remove_if(nonces.begin(), nonces.end(), is_useless), nonces.end());
}

std::size_t SessionTable::offers() const {
  MutexLock lock(&mutex_);
  return offers_.size();
}

absl::StatusOr<std::vector<SessionTable::Descriptor>> SessionTable::Claim(
    const Nonce& nonce, const ClientProcess& process) {
  MutexLock lock(&mutex_);
  const auto found = offers_.find(nonce);
  if (found == offers_.end() || clock_->NowNs() > found->second.expires_ns) {
    return absl::NotFoundError("unknown, used or expired nonce; register again, or join again");
  }
  if (found->second.uid != process.uid || found->second.pid != process.pid) {
    return absl::PermissionDeniedError("this nonce belongs to another process");
  }
  std::vector<Descriptor> descriptors;
  for (const auto& [owner, fd] : found->second.descriptors) {
    descriptors.push_back({owner.lock(), fd});
  }
  offers_.erase(found);
  const bool freed = std::any_of(descriptors.begin(), descriptors.end(),
                                 [](const Descriptor& one) { return one.owner == nullptr; });
  if (freed) return absl::NotFoundError("the memory has been freed: its agreement has failed");
  return descriptors;
}

void SessionTable::End(std::shared_ptr<Session> session, const absl::Status& why) {
  const SessionIdentity& identity = session->identity();
  session->End(why);
  // A rank that had left, or whose job had ended, is not lost.
  const RankState state = session->job().StateOf(identity.session());
  const bool lost = state == RankState::kLost || state == RankState::kHeld;
  {
    MutexLock lock(&mutex_);
    // Called for the end of the stream and of the process. The first call counts.
    closed_.erase(identity.incarnation);
    if (sessions_.erase(identity.incarnation) > 0) {
      if (lost) ++lost_;
      const Tenant user = identity.process.tenant();
      if (--per_user_[user] == 0) per_user_.erase(user);
      if (const auto nonces = nonces_.find(identity.incarnation); nonces != nonces_.end()) {
        for (const Nonce& nonce : nonces->second) offers_.erase(nonce);
        nonces_.erase(nonces);
      }
    }
  }
  // Unmapping an arena takes milliseconds.
  executor_->Run(identity.process.tenant(), [released = std::move(session)] {});
}

void SessionTable::ConnectionClosed(std::shared_ptr<Session> session, const absl::Status& why) {
  const std::uint64_t incarnation = session->identity().incarnation;
  if (session->identity().hold && DetailsOf(why).reason != reason::kProcessEnded.text()) {
    MutexLock lock(&mutex_);
    if (!draining_ && sessions_.count(incarnation) > 0) {
      // If it waits already, the first reason and its time count.
      closed_.emplace(incarnation, Closed{std::move(session), why,
                                          clock_->NowNs() + policy_.lease_ns, /*killed=*/false});
      return;
    }
  }
  End(std::move(session), why);
}

void SessionTable::EndForBreach(const std::shared_ptr<Session>& session, const absl::Status& why) {
  const SessionIdentity& identity = session->identity();
  JobPort& job = session->job();
  const bool comes_back = job.StateOf(identity.session()) == RankState::kHealing;
  if (!comes_back || draining() || !job.WouldHold(identity.session())) return session->End(why);
  {
    MutexLock lock(&mutex_);
    closed_.emplace(identity.incarnation,
                    Closed{session, why, clock_->NowNs() + policy_.lease_ns, /*killed=*/false});
  }
  session->TellEnd(why);
}

bool SessionTable::KillToHold(const std::shared_ptr<Session>& session, const absl::Status& why) {
  const SessionIdentity& identity = session->identity();
  if (!identity.hold || draining() || !session->job().WouldHold(identity.session())) return false;
  if (!Kill(identity.process)) return false;
  LogLimited(LogLevel::kWarning, "killed a process, so that its rank can be replaced",
             {{"job", session->job().job_id()},
              {"rank", identity.rank},
              {"uid", identity.process.tenant()},
              {"pid", identity.process.pid},
              {"why", why.message()}});
  MutexLock lock(&mutex_);
  if (sessions_.count(identity.incarnation) == 0) return true;
  closed_[identity.incarnation] = {session, why, clock_->NowNs() + policy_.lease_ns,
                                   /*killed=*/true};
  return true;
}

void SessionTable::EndClosed(bool all) {
  std::vector<Closed> closed;
  {
    MutexLock lock(&mutex_);
    for (const auto& entry : closed_) closed.push_back(entry.second);
  }
  for (const Closed& one : closed) {
    const ClientProcess& process = one.session->identity().process;
    if (HasEnded(process, /*patience_ms=*/0)) {
      End(one.session, ProcessEndedError(process));
    } else if (all || clock_->NowNs() >= one.expires_ns) {
      const bool kill = !one.killed && MayBeKilled(*one.session);
      if (!kill || !KillToHold(one.session, one.why)) End(one.session, one.why);
    }
  }
}

bool SessionTable::MayBeKilled(const Session& session) const {
  bool others = false;
  MutexLock lock(&mutex_);
  for (const auto& [incarnation, other] : sessions_) {
    if (other.get() == &session || closed_.count(incarnation) > 0) continue;
    if (MayBeSame(other->identity().process, session.identity().process)) return false;
    others = others || &other->job() == &session.job();
  }
  return others;
}

void SessionTable::Tick() {
  const std::uint64_t now_ns = clock_->NowNs();
  EndClosed(/*all=*/false);
  for (const auto& session : Sessions()) {
    if (IsClosed(*session)) continue;
    const absl::Status expired = session->CheckLease(now_ns);
    if (expired.ok() || KillToHold(session, expired)) continue;
    session->End(expired);
    if (fence_ && session->on_gpu()) fence_(session->identity().process);
  }
  jobs_->Tick();
}

void SessionTable::WorkerLost(const WorkerKey& key, const absl::Status& why) {
  for (const auto& session : Sessions()) session->WorkerLost(key, why);
}

void SessionTable::Drain() {
  {
    MutexLock lock(&mutex_);
    draining_ = true;
  }
  EndClosed(/*all=*/true);
}

bool SessionTable::IsClosed(const Session& session) const {
  MutexLock lock(&mutex_);
  return closed_.count(session.identity().incarnation) > 0;
}

bool SessionTable::draining() const {
  MutexLock lock(&mutex_);
  return draining_;
}

std::vector<std::shared_ptr<Session>> SessionTable::Sessions() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Session>> sessions;
  sessions.reserve(sessions_.size());
  for (const auto& entry : sessions_) sessions.push_back(entry.second);
  return sessions;
}

std::uint64_t SessionTable::opened() const {
  MutexLock lock(&mutex_);
  return opened_;
}

std::uint64_t SessionTable::lost() const {
  MutexLock lock(&mutex_);
  return lost_;
}

}  // namespace gradsync::daemon
