#include "daemon/peer/peer_service.h"

#include <grpcpp/grpcpp.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/mutex.h"
#include "daemon/peer/agent_session.h"
#include "daemon/peer/coordinator_link.h"
#include "daemon/peer/peer_address.h"
#include "daemon/peer/peer_credentials.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/peer/ticker.h"
#include "daemon/rpc/completion_dispatcher.h"
#include "daemon/rpc/stream_acceptor.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

constexpr int kThreads = 2;
constexpr auto kTick = std::chrono::milliseconds(100);
constexpr absl::Duration kStopPatience = absl::Seconds(5);
// Jobs at a time of one other daemon, and streams at a time of all of them.
constexpr int kStreamsPerConnection = 256;
constexpr std::size_t kMaxNodes = 4096;
// How many names of this daemon it remembers. Clients choose them, so there must be a limit.
constexpr std::size_t kMaxSelves = 64;
// A connection without an HTTP/2 handshake is closed after this.
constexpr int kHandshakeTimeoutMs = 10'000;
// A connection without a stream is closed after this.
constexpr int kIdleConnectionMs = 30'000;
// What a message between daemons has beside the trainer's message that it carries. So the largest
// message that an agent accepts from a trainer also reaches the coordinator.
constexpr std::size_t kEnvelopeBytes = 64 << 10;

std::string RandomInstance() {
  std::string instance(kInstanceBytes, '\0');
  // The kernel returns that few bytes in one call.
  if (getrandom(instance.data(), instance.size(), 0) < 0) instance.assign(kInstanceBytes, '?');
  return instance;
}

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

class PeerService::Impl {
 public:
  Impl(const PeerOptions& options, const PeerEnvironment& environment)
      : options_(options), environment_(environment), instance_(RandomInstance()) {
    node_name_ = NodeName(options.node_name);
  }

  absl::Status Start() {
    const auto listen = ParsePeerAddress(options_.listen, kPeerPort);
    if (!listen.ok()) return listen.status();
    if (listen->port != 0) others_port_ = listen->port;
    auto credentials =
        PeerCredentials::Read(options_.tls_certificate, options_.tls_key, options_.tls_ca);
    if (!credentials.ok()) return credentials.status();
    credentials_ = *std::move(credentials);
    reaper_ = std::make_unique<ConcurrentExecutor>();
    ticker_ = std::make_unique<Ticker>(kTick, [this] { return Tick(); });

    agent_context_.instance = instance_;
    agent_context_.node_name = node_name_;
    agent_context_.limits = options_.limits;
    agent_context_.clock = environment_.clock;
    agent_context_.worker_idle_limit_ns = options_.worker_idle_limit_ns;
    agent_context_.jobs = environment_.jobs;
    agent_context_.find_node_group = [this](const JobKey& key) { return FindNodeGroup(key); };
    const std::string engine_address = listen->IsWildcard() ? "" : listen->host;
    group_environment_.node_name = node_name_;
    group_environment_.address = engine_address;
    group_environment_.engine = options_.engine;
    group_environment_.make_engine = environment_.make_engine;
    group_environment_.reaper = reaper_.get();
    group_environment_.clock = environment_.clock;
    link_context_.instance = instance_;
    link_context_.node_name = node_name_;
    link_context_.address = engine_address;
    link_context_.staging_bytes = options_.limits.staging_bytes;
    link_context_.reach_patience_ns = options_.reach_patience_ns;
    link_context_.max_buckets = options_.limits.buckets;
    link_context_.make_engine = environment_.make_engine;
    link_context_.executor = environment_.executor;
    link_context_.reaper = reaper_.get();
    link_context_.clock = environment_.clock;
    link_context_.here = environment_.jobs;

    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort(listen->Text(), credentials_.server, &port);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
    builder.SetMaxReceiveMessageSize(MaxMessageBytes());
    builder.RegisterService(&service_);
    dispatcher_ = std::make_unique<CompletionDispatcher>(builder.AddCompletionQueue());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      dispatcher_->Stop();
      server_.reset();
      dispatcher_.reset();
      return absl::UnavailableError(
          absl::StrCat("peer_listen: cannot listen on ", listen->Text(),
                       ": it is no address of this host, or the port is taken"));
    }
    PeerAddress bound = *listen;
    bound.port = port_ = static_cast<std::uint16_t>(port);
    address_ = bound.Text();
    if (!listen->IsLoopback()) {
      if (options_.tls_certificate.empty()) {
        warnings_.push_back(absl::StrCat(
            "peer port ", address_,
            " is open without TLS: everyone who reaches it can join any user's jobs. Set "
            "peer_tls_certificate, peer_tls_key and peer_tls_ca, or keep others off "
            "that network."));
      }
      notices_.emplace_back(
          "gradients travel between nodes in clear text and unauthenticated, with TLS on "
          "the peer port or without: keep others off that network.");
    }
    for (const auto* lines : {&warnings_, &notices_}) {
      for (const std::string& line : *lines) Log(LogLevel::kWarning, line);
    }
    StreamAcceptor<AgentSession>::Hooks hooks;
    hooks.make = [this] { return std::make_shared<AgentSession>(agent_context_); };
    hooks.request = [this](auto* call, auto* stream, auto* queue, void* tag) {
      service_.RequestAttach(call, stream, queue, queue, tag);
    };
    hooks.accepted = [this](AgentSession* node, std::size_t open) { Accepted(node, open); };
    acceptor_.Start(std::move(hooks), dispatcher_->queue());
    dispatcher_->Start(kThreads);
    return absl::OkStatus();
  }

  ~Impl() {
    if (server_ == nullptr) return;
    EndAll(MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the daemon is stopping"));
    ticker_->Stop();
    for (const auto& node_group : NodeGroups()) node_group->Shutdown();
    server_->Shutdown(std::chrono::system_clock::now());
    for (const auto& link : Links()) link->Cancel();
    {
      MutexLock lock(&mutex_);
      links_.clear();
      node_groups_.clear();
    }
    // The last reference to a stream goes on a thread of gRPC, without notice. So this polls.
    const absl::Time deadline = absl::Now() + kStopPatience;
    while (!AllStreamsEnded() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    if (!AllStreamsEnded()) {
      MutexLock lock(&mutex_);
      Log(LogLevel::kWarning, "streams between nodes did not end",
          {{"nodes", acceptor_.Open().size()}, {"coordinators", Alive(&dialed_).size()}});
    }
    server_->Wait();
    dispatcher_->Stop();
    reaper_.reset();  // the engines that it destroys may still call back
  }

  void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
            std::function<void(absl::StatusOr<Joined>)> joined) {
    if (request.coordinator.empty()) {
      return environment_.jobs->Join(request, std::move(sink), std::move(joined));
    }
    const auto address = ParsePeerAddress(request.coordinator, others_port_);
    if (!address.ok()) return joined(address.status());
    const std::string text = address->Text();
    for (;;) {
      std::shared_ptr<CoordinatorLink> link;
      bool here = (address->IsLoopback() && !address->port_given) || text == address_ ||
                  (address->port == port_ && NamesThisHost(address->host));
      bool dial = false;
      Crowd crowd;
      {
        MutexLock lock(&mutex_);
        here = here || selves_.count(text) > 0;
        if (!here && links_.count({text, request.key}) == 0) crowd = CrowdLocked(request.key.uid);
        if (!here && crowd.empty()) {
          auto& slot = links_[{text, request.key}];
          if (slot == nullptr || slot->ended()) {
            slot = CoordinatorLink::Create(link_context_, text, request.key);
            dialed_.push_back(slot);
            dial = true;
          }
          link = slot;
        }
      }
      if (!crowd.empty()) {
        // A link that waits for its job to start again gives its place to one that is needed.
        const auto drop = [](const auto& one) { return one->Drop("another job takes its place"); };
        if (std::any_of(crowd.begin(), crowd.end(), drop)) continue;
        return joined(MakeError(
            absl::StatusCode::kResourceExhausted, reason::kQuota,
            absl::StrCat("user ", request.key.uid, " has ", options_.quota_jobs_per_user,
                         " jobs here that other nodes coordinate, as many as quota_jobs_per_user "
                         "allows"),
            {{field::kJob, request.key.job_id}}));
      }
      if (here) return environment_.jobs->Join(request, std::move(sink), std::move(joined));
      if (dial) link->Dial(ChannelTo(text), dispatcher_->queue());
      ticker_->Wake();
      if (link->Join(request, sink, joined)) return;
    }
  }

  void EndAll(const absl::Status& why) {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    for (const auto& link : Links()) link->EndRanks(why);
  }

  bool EndIdle(const absl::Status& why) {
    bool all = true;
    for (const auto& link : Links()) all = link->EndIdle(why) && all;
    return all;
  }

  std::uint64_t engines_made() {
    std::uint64_t made = 0;
    for (const auto& node_group : NodeGroups()) made += node_group->epochs();
    for (const auto& link : Links()) made += link->epochs();
    return made;
  }

  const std::string& address() const { return address_; }
  const std::string& node_name() const { return node_name_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  const std::vector<std::string>& notices() const { return notices_; }

  JobNodes NodesOf(const Job& job) {
    const JobIdentity& identity = job.identity();
    std::shared_ptr<NodeGroup> node_group;
    {
      MutexLock lock(&mutex_);
      const auto found =
          node_groups_.find(JobKey{identity.uid, identity.job_id, identity.token_hash});
      if (found != node_groups_.end()) node_group = found->second;
    }
    return node_group == nullptr ? JobNodes{} : node_group->NodesOf(job);
  }

  std::vector<RemoteJobSnapshot> RemoteJobs() {
    std::vector<RemoteJobSnapshot> jobs;
    for (const auto& link : Links()) {
      if (auto job = link->Snapshot()) jobs.push_back(*std::move(job));
    }
    return jobs;
  }

 private:
  using Crowd = std::vector<std::shared_ptr<CoordinatorLink>>;

  int MaxMessageBytes() const {
    return static_cast<int>(options_.max_message_bytes + kEnvelopeBytes);
  }

  std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(MaxMessageBytes());
    if (!options_.tls_name.empty()) arguments.SetSslTargetNameOverride(options_.tls_name);
    return grpc::CreateCustomChannel(address, credentials_.client, arguments);
  }

  void Accepted(AgentSession* node, std::size_t open) {
    if (open > kMaxNodes) {
      node->Close(MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                            absl::StrCat("the daemon of node ", node_name_, " serves ", kMaxNodes,
                                         " streams of other nodes, as many as it may")));
    }
    ticker_->Wake();
  }

  absl::StatusOr<std::shared_ptr<NodeGroup>> FindNodeGroup(const JobKey& key) {
    if (const absl::Status status = CheckToken(key); !status.ok()) return status;
    MutexLock lock(&mutex_);
    if (stopping_) {
      return MakeError(absl::StatusCode::kUnavailable, reason::kDraining,
                       absl::StrCat("the daemon of node ", node_name_, " is stopping"));
    }
    auto& node_group = node_groups_[key];
    if (node_group == nullptr) node_group = std::make_shared<NodeGroup>(key, group_environment_);
    return node_group;
  }

  // CREDENTIALS if rank 0 of the job has joined on this node with another token, and none with this
  // one. Other ranks do not count: rank 0's token is the right one.
  absl::Status CheckToken(const JobKey& key) {
    bool other = false;
    for (const auto& job : environment_.jobs->Jobs()) {
      const JobIdentity& identity = job->identity();
      if (identity.uid != key.uid || identity.job_id != key.job_id || !job->LiveHere(0)) continue;
      if (identity.token_hash == key.token_hash) return absl::OkStatus();
      other = true;
    }
    if (!other) return absl::OkStatus();
    return MakeError(absl::StatusCode::kPermissionDenied, reason::kCredentials,
                     absl::StrCat("job '", key.job_id, "' runs on node ", node_name_,
                                  " with another token: set the same GRADSYNC_JOB_TOKEN on every "
                                  "node"),
                     {{field::kJob, key.job_id}, {field::kNode, node_name_}});
  }

  // Ends jobs whose ranks joined from other nodes before rank 0, with another token than rank 0's.
  void CheckTokens(const std::shared_ptr<NodeGroup>& node_group) {
    for (const auto& job : node_group->Jobs()) {
      if (job->Formed() || job->Empty() || job->LiveHere(0)) continue;
      for (const auto& other : environment_.jobs->Jobs()) {
        const JobIdentity& identity = other->identity();
        if (identity.uid != node_group->key().uid || identity.job_id != node_group->key().job_id ||
            identity.token_hash == node_group->key().token_hash || !other->LiveHere(0)) {
          continue;
        }
        job->End(MakeError(
            absl::StatusCode::kPermissionDenied, reason::kCredentials,
            absl::StrCat("rank 0 of job '", identity.job_id, "' came to node ", node_name_,
                         " with another token: set the same "
                         "GRADSYNC_JOB_TOKEN on every node"),
            {{field::kJob, identity.job_id}, {field::kNode, node_name_}}));
      }
    }
  }

  // The user's links, if there are as many as the quota allows; otherwise none.
  Crowd CrowdLocked(std::uint32_t uid) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Crowd crowd;
    for (const auto& [key, link] : links_) {
      if (key.second.uid == uid && !link->ended()) crowd.push_back(link);
    }
    if (crowd.size() < options_.quota_jobs_per_user) crowd.clear();
    return crowd;
  }

  std::vector<std::shared_ptr<NodeGroup>> NodeGroups() {
    MutexLock lock(&mutex_);
    std::vector<std::shared_ptr<NodeGroup>> node_groups;
    for (const auto& [key, node_group] : node_groups_) node_groups.push_back(node_group);
    return node_groups;
  }

  std::vector<std::shared_ptr<CoordinatorLink>> Links() {
    MutexLock lock(&mutex_);
    std::vector<std::shared_ptr<CoordinatorLink>> links;
    for (const auto& [key, link] : links_) links.push_back(link);
    return links;
  }

  template <class T>
  static std::vector<std::shared_ptr<T>> Alive(std::vector<std::weak_ptr<T>>* all) {
    std::vector<std::weak_ptr<T>> kept;
    std::vector<std::shared_ptr<T>> alive;
    for (const auto& weak : *all) {
      if (auto one = weak.lock()) {
        kept.push_back(weak);
        alive.push_back(std::move(one));
      }
    }
    *all = std::move(kept);
    return alive;
  }

  bool AllStreamsEnded() {
    acceptor_.Stop();
    if (!acceptor_.Open().empty()) return false;
    MutexLock lock(&mutex_);
    return Alive(&dialed_).empty();
  }

  // False while there is no other node.
  bool Tick() {
    const std::uint64_t now_ns = environment_.clock->NowNs();
    const std::vector<std::shared_ptr<AgentSession>> nodes = acceptor_.Open();
    std::vector<std::shared_ptr<NodeGroup>> unused;
    bool any = false;
    {
      MutexLock lock(&mutex_);
      (void)Alive(&dialed_);
      for (auto it = links_.begin(); it != links_.end();) {
        if (it->second->is_self()) {
          if (selves_.size() >= kMaxSelves) selves_.clear();
          selves_.insert(it->first.first);
        }
        it = it->second->is_self() || it->second->ended() ? links_.erase(it) : std::next(it);
      }
      for (auto it = node_groups_.begin(); it != node_groups_.end();) {
        if (it->second.use_count() == 1 && it->second->Idle()) {
          unused.push_back(std::move(it->second));
          it = node_groups_.erase(it);
        } else {
          ++it;
        }
      }
      any = !nodes.empty() || !links_.empty() || !node_groups_.empty();
    }
    for (const auto& node_group : unused) node_group->Shutdown();
    for (const auto& node : nodes) node->Tick(now_ns);
    for (const auto& link : Links()) link->Tick(now_ns);
    for (const auto& node_group : NodeGroups()) {
      CheckTokens(node_group);
      node_group->Tick();
    }
    environment_.jobs->Tick();
    return any;
  }

  const PeerOptions options_;
  const PeerEnvironment environment_;
  const std::string instance_;
  // Constant once Start() has returned.
  std::string node_name_;
  std::string address_;
  std::uint16_t port_ = 0;
  // The port of a coordinator that is named without one: the nodes' daemons are configured alike.
  std::uint16_t others_port_ = kPeerPort;
  std::vector<std::string> warnings_;
  std::vector<std::string> notices_;
  PeerCredentials credentials_;
  AgentSessionContext agent_context_;
  NodeGroupEnvironment group_environment_;
  LinkContext link_context_;

  // Destroying an engine that is connecting can take 10 s. Other jobs do not wait for it.
  std::unique_ptr<ConcurrentExecutor> reaper_;
  std::unique_ptr<Ticker> ticker_;
  v1::Peer::AsyncService service_;
  StreamAcceptor<AgentSession> acceptor_;
  std::unique_ptr<CompletionDispatcher> dispatcher_;
  std::unique_ptr<grpc::Server> server_;

  Mutex mutex_;
  std::map<JobKey, std::shared_ptr<NodeGroup>> node_groups_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, JobKey>, std::shared_ptr<CoordinatorLink>> links_
      ABSL_GUARDED_BY(mutex_);
  std::set<std::string> selves_ ABSL_GUARDED_BY(mutex_);  // addresses of this daemon
  std::vector<std::weak_ptr<CoordinatorLink>> dialed_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

std::string NodeName(const std::string& given) {
  if (!given.empty()) return given;
  char name[65] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

PeerService::PeerService(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PeerService::~PeerService() = default;

absl::StatusOr<std::unique_ptr<PeerService>> PeerService::Start(
    const PeerOptions& options, const PeerEnvironment& environment) {
  auto impl = std::make_unique<Impl>(options, environment);
  if (absl::Status started = impl->Start(); !started.ok()) return started;
  return std::unique_ptr<PeerService>(new PeerService(std::move(impl)));
}

void PeerService::Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
                       std::function<void(absl::StatusOr<Joined>)> joined) {
  impl_->Join(request, std::move(sink), std::move(joined));
}
bool PeerService::EndIdle(const absl::Status& why) { return impl_->EndIdle(why); }
void PeerService::EndAll(const absl::Status& why) { impl_->EndAll(why); }
const std::string& PeerService::address() const { return impl_->address(); }
const std::string& PeerService::node_name() const { return impl_->node_name(); }
const std::vector<std::string>& PeerService::warnings() const { return impl_->warnings(); }
const std::vector<std::string>& PeerService::notices() const { return impl_->notices(); }
JobNodes PeerService::NodesOf(const Job& job) { return impl_->NodesOf(job); }
std::vector<RemoteJobSnapshot> PeerService::RemoteJobs() { return impl_->RemoteJobs(); }
std::uint64_t PeerService::engines_made() const { return impl_->engines_made(); }

}  // namespace gradsync::daemon
