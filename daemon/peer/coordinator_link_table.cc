#include "daemon/peer/coordinator_link_table.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/peer/peer_protocol.h"

namespace gradsync::daemon {
namespace {

// How many names of this daemon it remembers. Clients choose them, so there must be a limit.
constexpr std::size_t kMaxSelves = 64;
constexpr std::uint64_t kSecondNs = 1'000'000'000;

// How often gRPC may connect for a user within KeyedRate::kRegainNs. While nothing listens, it
// connects once a second for each job, to each address of the name.
constexpr std::size_t kDialsOfUser = 64;
constexpr std::size_t kDialsPerJob = 32;
// How many engines a user's coordinators may connect in that time, and one more for each job. A
// coordinator connects one again when nodes have joined or left. Each is a process, which takes the
// daemon's time to start.
constexpr std::size_t kEnginesOfUser = 64;

// What gRPC may hold of a user's coordinators before it ends streams: a few long messages, and for
// each link the buffers of its connection.
constexpr std::size_t kQuotaBytes = std::size_t{64} << 20;
constexpr std::size_t kQuotaBytesPerLink = 128 << 10;
// How long gRPC tries to connect to an address before it begins anew, or takes the name's next one.
// Long enough for TLS with a distant node, or with a busy one. Short enough for a node that comes
// up meanwhile: the kernel repeats a lost handshake after longer and longer pauses.
constexpr int kAttemptMs = 5000;
static_assert(kQuotaBytes >= 4 * std::size_t{kMaxCoordinatorMessageBytes});

// Whether this is the host's own name. The resolver may map it to an address on which no daemon
// listens (127.0.1.1 on Debian).
bool NamesThisHost(const std::string& host) {
  char name[65] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return false;
  const std::string own = absl::AsciiStrToLower(name);
  const std::string given = absl::AsciiStrToLower(host);
  return given == own || given == own.substr(0, own.find('.'));
}

}  // namespace

CoordinatorLinkTable::CoordinatorLinkTable(Options options)
    : options_(std::move(options)),
      dial_rate_(
          std::make_shared<UserRate>(kDialsOfUser + kDialsPerJob * options_.quota_jobs_per_user)),
      engine_rate_(std::make_shared<UserRate>(kEnginesOfUser + options_.quota_jobs_per_user)) {}

std::size_t CoordinatorLinkTable::Quota() const {
  return kQuotaBytes + options_.quota_jobs_per_user * kQuotaBytesPerLink;
}

void CoordinatorLinkTable::Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
                                std::function<void(absl::StatusOr<Joined>)> joined) {
  const auto address = ParsePeerAddress(request.coordinator, options_.default_port);
  if (!address.ok()) {
    return joined(MakeError(address.status().code(), DetailsOf(address.status()),
                            absl::StrCat(address.status().message(),
                                         ": correct coordinator, GRADSYNC_COORDINATOR or "
                                         "MASTER_ADDR")));
  }
  const std::string text = address->Text();
  if (!options_.coordinators.Allows(*address) && !IsOwn(*address)) {
    return joined(
        MakeError(absl::StatusCode::kPermissionDenied, reason::kCoordinatorRefused,
                  absl::StrCat("this node's daemon may not connect to a coordinator at ", text,
                               ": its peer_coordinators do not list that host and port. Correct "
                               "coordinator or MASTER_ADDR, or add host and port to "
                               "peer_coordinators"),
                  {{field::kJob, request.key.job_id}, {field::kAddress, text}}));
  }
  const Tenant user(request.key.uid, request.pod);
  for (;;) {
    std::shared_ptr<CoordinatorLink> link, ended;
    bool here = IsOwn(*address);
    absl::Status refusal;
    std::shared_ptr<DialedSockets> sockets;  // not null: the link is to be dialed
    std::uint64_t paused_ns = 0;
    Links crowd;
    {
      MutexLock lock(&mutex_);
      refusal = refusal_;
      here = here || selves_.count({user, text}) > 0;
      const auto found = links_.find({text, request.key});
      const bool is_new = !here && (found == links_.end() || found->second->ended());
      if (is_new) paused_ns = PauseLeftLocked(user);
      if (!here && found == links_.end()) crowd = CrowdLocked(user);
      if (!here && refusal.ok() && crowd.empty() && paused_ns == 0) {
        auto& slot = links_[{text, request.key}];
        if (is_new) {
          ended = slot;
          LinkContext context = options_.link;
          context.counted = streams_.Add();
          context.payer = user;
          context.engine_rate = engine_rate_;
          context.anew = this;
          sockets = context.sockets =
              std::make_shared<DialedSockets>(!context.tls, user, dial_rate_);
          slot = CoordinatorLink::Create(context, text, request.key);
        }
        link = slot;
      }
    }
    if (ended != nullptr) ended->CloseConnection();
    if (!refusal.ok()) return joined(refusal);
    if (paused_ns > 0) {
      return joined(MakeError(
          absl::StatusCode::kResourceExhausted, reason::kQuota,
          absl::StrCat("a coordinator of user ", user.Text(), " did harm, so this node's daemon ",
                       "connects to none for this user for ",
                       (paused_ns + kSecondNs - 1) / kSecondNs,
                       " s. Try again then. Its log has the address: 'coordinator refused' or "
                       "'coordinator lost'"),
          {{field::kJob, request.key.job_id}}));
    }
    if (!crowd.empty()) {
      // A link that waits for its job to start again gives its place to one that is needed.
      const auto drop = [](const auto& one) { return one->Drop("another job takes its place"); };
      if (std::any_of(crowd.begin(), crowd.end(), drop)) continue;
      return joined(MakeError(
          absl::StatusCode::kResourceExhausted, reason::kQuota,
          absl::StrCat("user ", user.Text(), " has ", options_.quota_jobs_per_user,
                       " jobs here that other nodes coordinate, as many as quota_jobs_per_user "
                       "allows: end one, or raise the quota"),
          {{field::kJob, request.key.job_id}}));
    }
    if (here) return options_.link.here->Join(request, std::move(sink), std::move(joined));
    if (sockets != nullptr) {
      link->Dial(ChannelTo(address->Target(), user, sockets), options_.queue);
    }
    options_.dialed();
    if (link->Join(request, sink, joined)) return;
  }
}

bool CoordinatorLinkTable::IsOwn(const PeerAddress& address) const {
  return (address.IsLoopback() && !address.port_given) || address.Text() == options_.own.Text() ||
         (address.port == options_.own.port && NamesThisHost(address.host));
}

CoordinatorLinkTable::Links CoordinatorLinkTable::CrowdLocked(const Tenant& user) {
  Links crowd;
  for (const auto& [key, link] : links_) {
    if (link->payer() == user && !link->ended()) crowd.push_back(link);
  }
  if (crowd.size() < options_.quota_jobs_per_user) crowd.clear();
  return crowd;
}

std::shared_ptr<grpc::Channel> CoordinatorLinkTable::ChannelTo(
    const std::string& target, const Tenant& user, const std::shared_ptr<DialedSockets>& sockets) {
  grpc::ChannelArguments arguments;
  DialedSockets::AddTo(sockets, &arguments);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // Despite its name: how long an attempt may take, until the other side's first frame has come.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kAttemptMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // gRPC limits a message before and after it decompresses it, not meanwhile.
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  // gRPC holds a message whole before it compares its length with the limit.
  arguments.SetMaxReceiveMessageSize(kMaxCoordinatorMessageBytes);
  arguments.SetInt(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kPeerReadBytes);
  arguments.SetInt(GRPC_ARG_MAX_CHANNEL_TRACE_EVENT_MEMORY_PER_NODE, 0);
  {
    MutexLock lock(&mutex_);
    const auto [quota, added] =
        quotas_.try_emplace(user, absl::StrCat("coordinators of user ", user.Text()));
    if (added) {
      quota->second.Resize(Quota());
    }
    arguments.SetResourceQuota(quota->second);
  }
  if (!options_.tls_name.empty()) arguments.SetSslTargetNameOverride(options_.tls_name);
  return grpc::CreateCustomChannel(target, options_.credentials, arguments);
}

bool CoordinatorLinkTable::DropEnded() {
  Links ended;
  const bool any = DropEnded(&ended);
  for (const auto& link : ended) link->CloseConnection();
  return any;
}

bool CoordinatorLinkTable::DropEnded(Links* ended) {
  MutexLock lock(&mutex_);
  for (auto it = links_.begin(); it != links_.end();) {
    if (it->second->is_self()) {
      if (selves_.size() >= kMaxSelves) selves_.clear();
      selves_.insert({it->second->payer(), it->first.first});
    }
    if (it->second->ended()) {
      NoteHarmLocked(it->second.get());
      ended->push_back(it->second);
    }
    it = it->second->is_self() || it->second->ended() ? links_.erase(it) : std::next(it);
  }
  for (auto it = pauses_.begin(); it != pauses_.end();) {
    const bool forgotten = it->second.IsForgiven(options_.link.clock->NowNs());
    it = forgotten ? pauses_.erase(it) : std::next(it);
  }
  std::set<Tenant> users;
  for (const auto& [key, link] : links_) users.insert(link->payer());
  for (auto it = quotas_.begin(); it != quotas_.end();) {
    it = users.count(it->first) > 0 ? std::next(it) : quotas_.erase(it);
  }
  return !links_.empty();
}

void CoordinatorLinkTable::Tick(std::uint64_t now_ns) {
  const Links links = All();
  // gRPC reads no more ahead from honest coordinators than the user's quota lets it hold.
  const std::uint64_t most = std::max<std::uint64_t>(kPeerVain.all, 2 * Quota());
  std::map<Tenant, std::uint64_t> vain;
  for (const auto& link : links) vain[link->payer()] += link->LookAtConnection();
  for (const auto& link : links) {
    if (link->EndIfHarmful(vain[link->payer()], most)) {
      MutexLock lock(&mutex_);
      pauses_[link->payer()].Extend(now_ns);
    }
  }
  for (const auto& link : links) link->Tick(now_ns);
}

void CoordinatorLinkTable::NoteHarmLocked(CoordinatorLink* link) {
  if (link->HasHarmed()) pauses_[link->payer()].Extend(options_.link.clock->NowNs());
}

std::uint64_t CoordinatorLinkTable::PauseLeftLocked(const Tenant& user) {
  for (const auto& [key, link] : links_) {
    if (link->payer() == user && link->ended()) NoteHarmLocked(link.get());
  }
  const auto pause = pauses_.find(user);
  return pause == pauses_.end() ? 0 : pause->second.LeftNs(options_.link.clock->NowNs());
}

bool CoordinatorLinkTable::EndIdle(const absl::Status& why) {
  Refuse(why);
  bool all = true;
  for (const auto& link : All()) all = link->EndIdle(why) && all;
  return all;
}

void CoordinatorLinkTable::EndRanks(const absl::Status& why) {
  Refuse(why);
  for (const auto& link : All()) link->EndRanks(why);
}

void CoordinatorLinkTable::Refuse(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (refusal_.ok()) refusal_ = why;
}

void CoordinatorLinkTable::Cancel() {
  Refuse(MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the daemon is stopping"));
  decltype(links_) links;
  {
    MutexLock lock(&mutex_);
    links.swap(links_);
  }
  for (const auto& [key, link] : links) link->Cancel();
}

std::vector<RemoteJobSnapshot> CoordinatorLinkTable::RemoteJobs(RemoteJobFilter wanted) {
  std::vector<RemoteJobSnapshot> jobs;
  for (const auto& link : All()) {
    if (auto job = link->Snapshot(wanted)) jobs.push_back(*std::move(job));
  }
  return jobs;
}

std::uint64_t CoordinatorLinkTable::engines_made() {
  std::uint64_t made = 0;
  for (const auto& link : All()) made += link->engines_made();
  return made;
}

CoordinatorLinkTable::Links CoordinatorLinkTable::All() {
  MutexLock lock(&mutex_);
  Links links;
  for (const auto& [key, link] : links_) links.push_back(link);
  return links;
}

}  // namespace gradsync::daemon
