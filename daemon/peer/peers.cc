#include "daemon/peer/peers.h"

#include <grpcpp/grpcpp.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/mutex.h"
#include "daemon/peer/attached_node.h"
#include "daemon/peer/coordinator_link.h"
#include "daemon/peer/peer_address.h"

namespace gradsync {
namespace {

constexpr int kThreads = 2;
constexpr auto kTick = std::chrono::milliseconds(100);
constexpr absl::Duration kStopPatience = absl::Seconds(5);
// Jobs of one connection's daemon at a time, and nodes at a time.
constexpr int kStreamsPerConnection = 256;
constexpr std::size_t kMaxNodes = 4096;
// Names of this daemon that are remembered; clients choose them.
constexpr std::size_t kMaxSelves = 64;
// Who connects and speaks no HTTP/2 is cut off after this.
constexpr int kHandshakeTimeoutMs = 10'000;
// A connection without a stream.
constexpr int kIdleConnectionMs = 30'000;
// What a message between daemons says beside the trainer's message that it carries, which has its
// own limit: the largest that an agent takes goes through.
constexpr std::size_t kEnvelopeBytes = 64 << 10;

std::string RandomInstance() {
  std::string instance(16, '\0');
  // The kernel gives so few bytes at once.
  if (getrandom(instance.data(), instance.size(), 0) < 0) instance.assign(16, '?');
  return instance;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file.good() || text.str().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' cannot be read, or is empty"));
  }
  return text.str();
}

// This host's own name, which its resolver may take for an address that nobody listens on
// (127.0.1.1 on Debian).
bool NamesThisHost(const std::string& host) {
  char name[65] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return false;
  const std::string own = absl::AsciiStrToLower(name);
  const std::string given = absl::AsciiStrToLower(host);
  return given == own || given == own.substr(0, own.find('.'));
}

struct Credentials {
  std::shared_ptr<grpc::ServerCredentials> server;
  std::shared_ptr<grpc::ChannelCredentials> client;
};

absl::StatusOr<Credentials> MakeCredentials(const PeerOptions& options) {
  const int given =
      !options.tls_certificate.empty() + !options.tls_key.empty() + !options.tls_ca.empty();
  if (given == 0) {
    return Credentials{grpc::InsecureServerCredentials(), grpc::InsecureChannelCredentials()};
  }
  if (given != 3) {
    return absl::InvalidArgumentError(
        "peer_tls_certificate, peer_tls_key and peer_tls_ca: give all three or none, since both "
        "sides show a certificate");
  }
  auto certificate = ReadFile(options.tls_certificate);
  if (!certificate.ok()) return certificate.status();
  auto key = ReadFile(options.tls_key);
  if (!key.ok()) return key.status();
  auto ca = ReadFile(options.tls_ca);
  if (!ca.ok()) return ca.status();
  grpc::SslServerCredentialsOptions server(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  server.pem_root_certs = *ca;
  server.pem_key_cert_pairs.push_back({*key, *certificate});
  grpc::SslCredentialsOptions client;
  client.pem_root_certs = *ca;
  client.pem_private_key = *key;
  client.pem_cert_chain = *certificate;
  return Credentials{grpc::SslServerCredentials(server), grpc::SslCredentials(client)};
}

}  // namespace

class Peers::Impl {
 public:
  Impl(const PeerOptions& options, const PeerEnvironment& environment)
      : options_(options), environment_(environment), instance_(RandomInstance()) {
    node_name_ = NodeName(options.node_name);
  }

  absl::Status Start() {
    const auto listen = ParsePeerAddress(options_.listen, kDefaultPeerPort);
    if (!listen.ok()) return listen.status();
    if (listen->port != 0) others_port_ = listen->port;
    auto credentials = MakeCredentials(options_);
    if (!credentials.ok()) return credentials.status();
    credentials_ = *std::move(credentials);
    reaper_ = std::make_unique<ConcurrentExecutor>();

    attached_.instance = instance_;
    attached_.node_name = node_name_;
    attached_.staging_bytes = options_.staging_bytes;
    attached_.limits = options_.limits;
    attached_.clock = environment_.clock;
    attached_.worker_idle_limit_ns = options_.worker_idle_limit_ns;
    attached_.jobs = environment_.jobs;
    attached_.find_cluster = [this](const JobKey& key) { return FindCluster(key); };
    const std::string engine_address = listen->IsWildcard() ? "" : listen->host;
    cluster_.node_name = node_name_;
    cluster_.address = engine_address;
    cluster_.engine = options_.engine;
    cluster_.make_engine = environment_.make_engine;
    cluster_.reaper = reaper_.get();
    cluster_.clock = environment_.clock;
    link_.instance = instance_;
    link_.node_name = node_name_;
    link_.address = engine_address;
    link_.staging_bytes = options_.staging_bytes;
    link_.reach_patience_ns = options_.reach_patience_ns;
    link_.max_buckets = options_.limits.buckets;
    link_.make_engine = environment_.make_engine;
    link_.executor = environment_.executor;
    link_.reaper = reaper_.get();
    link_.clock = environment_.clock;
    link_.here = environment_.jobs;

    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort(listen->Text(), credentials_.server, &port);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
    builder.SetMaxReceiveMessageSize(MaxMessageBytes());
    builder.RegisterService(&service_);
    queue_ = builder.AddCompletionQueue();
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      queue_->Shutdown();
      void* tag = nullptr;
      bool ok = false;
      while (queue_->Next(&tag, &ok)) {
      }
      server_.reset();
      queue_.reset();
      return absl::UnavailableError(
          absl::StrCat("peer_listen: cannot listen on ", listen->Text(),
                       ": it is no address of this host, or the port is taken"));
    }
    PeerAddress bound = *listen;
    bound.port = port_ = static_cast<std::uint16_t>(port);
    address_ = bound.Text();
    if (!listen->IsLoopback()) {
      if (options_.tls_certificate.empty()) {
        warnings_.push_back(
            absl::StrCat("peer port ", address_,
                         " is open without TLS: whoever reaches it can join any user's jobs. Set "
                         "peer_tls_certificate, peer_tls_key and peer_tls_ca, or keep others off "
                         "that network."));
      }
      notices_.emplace_back(
          "gradients travel between nodes in clear text and unauthenticated, with TLS on "
          "the peer port or without: keep others off that network.");
    }
    for (const auto* said : {&warnings_, &notices_}) {
      for (const std::string& line : *said) Log(LogLevel::kWarning, line);
    }
    AcceptNext();
    for (int i = 0; i < kThreads; ++i) {
      threads_.emplace_back([this] {
        void* tag = nullptr;
        bool ok = false;
        while (queue_->Next(&tag, &ok)) static_cast<PeerCompletion*>(tag)->Run(ok);
      });
    }
    ticker_ = std::thread([this] { TickLoop(); });
    return absl::OkStatus();
  }

  ~Impl() {
    if (server_ == nullptr) return;
    EndAll(MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon is stopping"));
    {
      std::lock_guard<std::mutex> lock(tick_mutex_);
      stop_ticking_ = true;
    }
    tick_.notify_all();
    ticker_.join();
    for (const auto& cluster : Clusters()) cluster->Shutdown();
    server_->Shutdown(std::chrono::system_clock::now());
    for (const auto& link : Links()) link->Cancel();
    {
      MutexLock lock(&mutex_);
      links_.clear();
      clusters_.clear();
    }
    // A stream's last reference goes on gRPC's threads, which tell nobody: looked at, at the end
    // alone.
    const absl::Time deadline = absl::Now() + kStopPatience;
    while (!Gone() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    if (!Gone()) {
      MutexLock lock(&mutex_);
      Log(LogLevel::kWarning, "streams between nodes did not end",
          {{"nodes", Alive(&nodes_).size()}, {"coordinators", Alive(&dialed_).size()}});
    }
    server_->Wait();
    queue_->Shutdown();
    for (std::thread& thread : threads_) thread.join();
    reaper_.reset();  // what it destroys may still call back
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
            slot = std::make_shared<CoordinatorLink>(link_, text, request.key);
            dialed_.push_back(slot);
            dial = true;
          }
          link = slot;
        }
      }
      if (!crowd.empty()) {
        // One that is kept for a job that may start again takes less than one that starts.
        const auto drop = [](const auto& one) { return one->Drop("another job takes its place"); };
        if (std::any_of(crowd.begin(), crowd.end(), drop)) continue;
        return joined(MakeError(
            absl::StatusCode::kResourceExhausted, "QUOTA",
            absl::StrCat("user ", request.key.uid, " has ", options_.quota_jobs_per_user,
                         " jobs here that other nodes coordinate, as many as quota_jobs_per_user "
                         "allows"),
            {{"job", request.key.job_id}}));
      }
      if (here) return environment_.jobs->Join(request, std::move(sink), std::move(joined));
      if (dial) link->Dial(ChannelTo(text), queue_.get());
      WakeTicker();
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
    for (const auto& cluster : Clusters()) made += cluster->epochs();
    for (const auto& link : Links()) made += link->epochs();
    return made;
  }

  const std::string& address() const { return address_; }
  const std::string& node_name() const { return node_name_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  const std::vector<std::string>& notices() const { return notices_; }

  JobNodes NodesOf(const Job& job) {
    const JobIdentity& identity = job.identity();
    std::shared_ptr<Cluster> cluster;
    {
      MutexLock lock(&mutex_);
      const auto found = clusters_.find(JobKey{identity.uid, identity.job_id, identity.token_hash});
      if (found != clusters_.end()) cluster = found->second;
    }
    return cluster == nullptr ? JobNodes{} : cluster->NodesOf(job);
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

  void AcceptNext() {
    const auto next = std::make_shared<AttachedNode>(attached_);
    // Of its own: gRPC is called with it.
    MutexLock lock(&accept_mutex_);
    if (stopped_accepting_) return;
    next->Accept(&service_, queue_.get(), [this](std::shared_ptr<AttachedNode> node, bool ok) {
      if (!ok) return;  // the server stops
      bool full = false;
      {
        MutexLock accepted(&mutex_);
        full = nodes_.size() >= kMaxNodes;
        nodes_.push_back(node);
      }
      if (full) {
        node->Close(MakeError(absl::StatusCode::kResourceExhausted, "QUOTA",
                              absl::StrCat("the daemon of node ", node_name_, " serves ", kMaxNodes,
                                           " streams of other nodes, and no more")));
      }
      WakeTicker();
      AcceptNext();
    });
  }

  absl::StatusOr<std::shared_ptr<Cluster>> FindCluster(const JobKey& key) {
    if (const absl::Status status = CheckToken(key); !status.ok()) return status;
    MutexLock lock(&mutex_);
    if (stopping_) {
      return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                       absl::StrCat("the daemon of node ", node_name_, " is stopping"));
    }
    auto& cluster = clusters_[key];
    if (cluster == nullptr) cluster = std::make_shared<Cluster>(key, cluster_);
    return cluster;
  }

  // Rank 0 of that job, on this node, may have come with another token, and none with this one. Who
  // else has come says nothing: before rank 0 nobody knows whose token is the right one.
  absl::Status CheckToken(const JobKey& key) {
    bool other = false;
    for (const auto& job : environment_.jobs->Jobs()) {
      const JobIdentity& identity = job->identity();
      if (identity.uid != key.uid || identity.job_id != key.job_id || !job->LiveHere(0)) continue;
      if (identity.token_hash == key.token_hash) return absl::OkStatus();
      other = true;
    }
    if (!other) return absl::OkStatus();
    return MakeError(absl::StatusCode::kPermissionDenied, "CREDENTIALS",
                     absl::StrCat("job '", key.job_id, "' runs on node ", node_name_,
                                  " with another token: set the same GRADSYNC_JOB_TOKEN on every "
                                  "node"),
                     {{"job", key.job_id}, {"node", node_name_}});
  }

  // Nodes whose ranks came before rank 0 did, with another token than its.
  void CheckTokens(const std::shared_ptr<Cluster>& cluster) {
    for (const auto& job : cluster->Jobs()) {
      if (job->Formed() || job->Over() || job->LiveHere(0)) continue;
      for (const auto& other : environment_.jobs->Jobs()) {
        const JobIdentity& identity = other->identity();
        if (identity.uid != cluster->key().uid || identity.job_id != cluster->key().job_id ||
            identity.token_hash == cluster->key().token_hash || !other->LiveHere(0)) {
          continue;
        }
        job->End(MakeError(
            absl::StatusCode::kPermissionDenied, "CREDENTIALS",
            absl::StrCat("rank 0 of job '", identity.job_id, "' came to node ", node_name_,
                         " with another token: set the same "
                         "GRADSYNC_JOB_TOKEN on every node"),
            {{"job", identity.job_id}, {"node", node_name_}}));
      }
    }
  }

  // The user's links, if there are as many as there may be.
  Crowd CrowdLocked(std::uint32_t uid) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Crowd crowd;
    for (const auto& [key, link] : links_) {
      if (key.second.uid == uid && !link->ended()) crowd.push_back(link);
    }
    if (crowd.size() < options_.quota_jobs_per_user) crowd.clear();
    return crowd;
  }

  std::vector<std::shared_ptr<Cluster>> Clusters() {
    MutexLock lock(&mutex_);
    std::vector<std::shared_ptr<Cluster>> clusters;
    for (const auto& [key, cluster] : clusters_) clusters.push_back(cluster);
    return clusters;
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

  bool Gone() {
    {
      MutexLock lock(&accept_mutex_);
      stopped_accepting_ = true;
    }
    MutexLock lock(&mutex_);
    return Alive(&nodes_).empty() && Alive(&dialed_).empty();
  }

  void WakeTicker() {
    {
      std::lock_guard<std::mutex> lock(tick_mutex_);
      active_ = true;
    }
    tick_.notify_all();
  }

  // Sleeps while there is no other node to look after.
  void TickLoop() {
    std::unique_lock<std::mutex> lock(tick_mutex_);
    while (!stop_ticking_) {
      if (!active_) {
        tick_.wait(lock);
        continue;
      }
      tick_.wait_for(lock, kTick);
      if (stop_ticking_) return;
      active_ = false;
      lock.unlock();
      const bool more = Tick();
      lock.lock();
      active_ = active_ || more;
    }
  }

  bool Tick() {
    const std::uint64_t now_ns = environment_.clock->NowNs();
    std::vector<std::shared_ptr<AttachedNode>> nodes;
    std::vector<std::shared_ptr<Cluster>> unused;
    bool any = false;
    {
      MutexLock lock(&mutex_);
      nodes = Alive(&nodes_);
      (void)Alive(&dialed_);
      for (auto it = links_.begin(); it != links_.end();) {
        if (it->second->is_self()) {
          if (selves_.size() >= kMaxSelves) selves_.clear();
          selves_.insert(it->first.first);
        }
        it = it->second->is_self() || it->second->ended() ? links_.erase(it) : std::next(it);
      }
      for (auto it = clusters_.begin(); it != clusters_.end();) {
        if (it->second.use_count() == 1 && it->second->Idle()) {
          unused.push_back(std::move(it->second));
          it = clusters_.erase(it);
        } else {
          ++it;
        }
      }
      any = !nodes.empty() || !links_.empty() || !clusters_.empty();
    }
    for (const auto& cluster : unused) cluster->Shutdown();
    for (const auto& node : nodes) node->Tick(now_ns);
    for (const auto& link : Links()) link->Tick(now_ns);
    for (const auto& cluster : Clusters()) {
      CheckTokens(cluster);
      cluster->Tick();
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
  // Of a coordinator that is named without one: the nodes' daemons are configured alike.
  std::uint16_t others_port_ = kDefaultPeerPort;
  std::vector<std::string> warnings_;
  std::vector<std::string> notices_;
  Credentials credentials_;
  AttachedContext attached_;
  ClusterEnvironment cluster_;
  LinkContext link_;

  // An engine that connects may hold its end up for 10 s: no other job's waits for that.
  std::unique_ptr<ConcurrentExecutor> reaper_;
  v1::Peer::AsyncService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::thread> threads_;

  std::mutex tick_mutex_;
  std::condition_variable tick_;
  bool active_ = false;
  bool stop_ticking_ = false;
  std::thread ticker_;

  Mutex mutex_;
  std::map<JobKey, std::shared_ptr<Cluster>> clusters_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, JobKey>, std::shared_ptr<CoordinatorLink>> links_
      ABSL_GUARDED_BY(mutex_);
  std::set<std::string> selves_ ABSL_GUARDED_BY(mutex_);  // addresses of this daemon
  std::vector<std::weak_ptr<AttachedNode>> nodes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<CoordinatorLink>> dialed_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  Mutex accept_mutex_;
  bool stopped_accepting_ ABSL_GUARDED_BY(accept_mutex_) = false;
};

std::string NodeName(const std::string& given) {
  if (!given.empty()) return given;
  char name[65] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

Peers::Peers(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Peers::~Peers() = default;

absl::StatusOr<std::unique_ptr<Peers>> Peers::Start(const PeerOptions& options,
                                                    const PeerEnvironment& environment) {
  auto impl = std::make_unique<Impl>(options, environment);
  if (absl::Status started = impl->Start(); !started.ok()) return started;
  return std::unique_ptr<Peers>(new Peers(std::move(impl)));
}

void Peers::Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
                 std::function<void(absl::StatusOr<Joined>)> joined) {
  impl_->Join(request, std::move(sink), std::move(joined));
}
bool Peers::EndIdle(const absl::Status& why) { return impl_->EndIdle(why); }
void Peers::EndAll(const absl::Status& why) { impl_->EndAll(why); }
const std::string& Peers::address() const { return impl_->address(); }
const std::string& Peers::node_name() const { return impl_->node_name(); }
const std::vector<std::string>& Peers::warnings() const { return impl_->warnings(); }
const std::vector<std::string>& Peers::notices() const { return impl_->notices(); }
JobNodes Peers::NodesOf(const Job& job) { return impl_->NodesOf(job); }
std::vector<RemoteJobSnapshot> Peers::RemoteJobs() { return impl_->RemoteJobs(); }
std::uint64_t Peers::engines_made() const { return impl_->engines_made(); }

}  // namespace gradsync
