#include "daemon/peer/peer_service.h"

#include <sys/random.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/fair_executor.h"
#include "daemon/base/logging.h"
#include "daemon/base/ticker.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/peer_tls.h"
#include "daemon/peer/address_memory.h"
#include "daemon/peer/agent_session.h"
#include "daemon/peer/certificate_watch.h"
#include "daemon/peer/coordinator_link_table.h"
#include "daemon/peer/engine_quota.h"
#include "daemon/peer/node_group_table.h"
#include "daemon/peer/peer_address.h"
#include "daemon/peer/peer_credentials.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/peer/peer_server.h"
#include "daemon/peer/peer_turns.h"
#include "daemon/peer/socket_table.h"
#include "daemon/peer/user_rate.h"
#include "daemon/worker/engine_memory.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// A user has jobs that are coordinated here, and as many that other nodes coordinate. A job that
// starts again has the engine that ends, too.
constexpr std::size_t kEnginesPerJob = 4;
// How often a user's jobs may begin an engine in a row, besides once for each job.
constexpr std::size_t kMeetings = 64;
constexpr auto kTick = std::chrono::milliseconds(100);
// With two threads, one user's long work leaves one for the others.
constexpr int kTurnThreads = 2;
// No step waits for messages that take up to a second.
constexpr int kLaunchThreads = 2;

std::string RandomInstance() {
  std::string instance(kInstanceBytes, '\0');
  // The kernel returns that few bytes in one call.
  if (getrandom(instance.data(), instance.size(), 0) < 0) instance.assign(kInstanceBytes, '?');
  return instance;
}

// Daemons of one cluster are configured alike.
std::uint16_t DefaultPort(const PeerAddress& listen) {
  return listen.port != 0 ? listen.port : kPeerPort;
}

// What the options of a PeerService name.
struct Prepared {
  PeerAddress listen;
  PeerCredentials credentials;
  CoordinatorList coordinators;
};

absl::StatusOr<Prepared> Prepare(const PeerOptions& options) {
  auto listen = ParsePeerAddress(options.listen, kPeerPort);
  if (!listen.ok()) return listen.status();
  auto credentials =
      PeerCredentials::Read(options.tls_certificate, options.tls_key, options.tls_ca);
  if (!credentials.ok()) return credentials.status();
  auto coordinators = CoordinatorList::Parse(options.coordinators, DefaultPort(*listen));
  if (!coordinators.ok()) return coordinators.status();
  return Prepared{*std::move(listen), *std::move(credentials), *std::move(coordinators)};
}

// The files with certificates that `credentials` have been read from. While a CA is replaced, the
// file of CAs has the old one and the new one: it serves until the last one expires.
std::vector<CertificateFile> CertificateFiles(const PeerOptions& options,
                                              const PeerCredentials& credentials) {
  if (credentials.keys == nullptr) return {};
  return {{options.tls_certificate, FirstExpiry(credentials.keys->certificate)},
          {options.tls_ca, LastExpiry(credentials.keys->ca)}};
}

}  // namespace

// The parts, and what they know of each other.
class PeerService::Impl {
 public:
  Impl(const PeerOptions& options, const PeerEnvironment& environment, const Prepared& prepared,
       std::unique_ptr<PeerServer> server)
      : options_(options),
        environment_(environment),
        listen_(prepared.listen),
        instance_(RandomInstance()),
        node_name_(NodeName(options.node_name)),
        address_(server->address().Text()),
        engines_(kEnginesPerJob * options.quota_jobs_per_user, environment.engine_memory),
        addresses_(environment.memory == nullptr ? 0 : environment.memory->bytes_per_user()),
        meetings_(kMeetings + options.quota_jobs_per_user),
        agent_context_(AgentContext()),
        server_(std::move(server)),
        make_engine_([this, keys = prepared.credentials.keys](
                         EngineSpec spec) -> absl::StatusOr<std::unique_ptr<Engine>> {
          const auto nodes = static_cast<std::uint32_t>(spec.node_names.size());
          if (absl::Status valid = ValidateEngine(spec.settings, nodes); !valid.ok()) return valid;
          auto counted = engines_.Take(spec.user, EngineBytes(spec.settings, nodes));
          if (!counted.ok()) return counted.status();
          spec.counted = *std::move(counted);
          spec.keys = keys;
          return environment_.make_engine(spec);
        }),
        node_groups_(GroupEnvironment()),
        links_(LinkOptions(prepared.credentials, prepared.coordinators)),
        certificates_(CertificateFiles(options, prepared.credentials)),
        ticker_(kTick, [this] { return Tick(); }) {
    NoteExposure();
    certificates_.Look(environment.clock->NowNs(), absl::Now());
    server_->LimitDescriptors(environment_.descriptors);
    server_->Accept(
        agent_context_, [this] { ticker_.Wake(); }, environment_.used);
  }

  ~Impl() {
    EndAll(MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the daemon is stopping"));
    ticker_.Stop();
    turns_.Stop();  // first: the server's streams end when their messages have had their turns
    node_groups_.Shutdown();
    server_->Shutdown();
    links_.Cancel();
    node_groups_.Clear();
    const auto deadline = std::chrono::steady_clock::now() + kStopPatience;
    const bool accepted_ended = server_->streams().WaitForNone(deadline);
    const bool dialed_ended = links_.streams().WaitForNone(deadline);
    if (!accepted_ended || !dialed_ended) {
      Log(LogLevel::kWarning, "streams between nodes did not end",
          {{"nodes", server_->streams().Get()}, {"coordinators", links_.streams().Get()}});
    }
    server_->Stop();
    // Their last tasks use the other members, and the reaper.
    launch_threads_.reset();
    turn_threads_.reset();
    reaper_.reset();  // the engines that it destroys may still call back
  }

  void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
            std::function<void(absl::StatusOr<Joined>)> joined) {
    if (request.coordinator.empty()) {
      return environment_.jobs->Join(request, std::move(sink), std::move(joined));
    }
    links_.Join(request, std::move(sink), std::move(joined));
  }

  void EndAll(const absl::Status& why) {
    node_groups_.Refuse();
    links_.EndRanks(why);
  }
  bool EndIdle(const absl::Status& why) { return links_.EndIdle(why); }

  std::uint64_t engines_made() { return node_groups_.engines_made() + links_.engines_made(); }
  const std::string& address() const { return address_; }
  const std::string& node_name() const { return node_name_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  const std::vector<std::string>& notices() const { return notices_; }
  JobNodes NodesOf(const Job& job) { return node_groups_.NodesOf(job); }
  std::vector<RemoteJobSnapshot> RemoteJobs(RemoteJobFilter wanted) {
    return links_.RemoteJobs(wanted);
  }

 private:
  // Where this node's engines listen. Empty: the address that the others reach.
  std::string EngineAddress() const { return listen_.IsWildcard() ? "" : listen_.host; }

  NodeGroupEnvironment GroupEnvironment() {
    NodeGroupEnvironment environment;
    environment.node_name = node_name_;
    environment.address = EngineAddress();
    environment.engine = options_.engine;
    environment.make_engine = make_engine_;
    environment.encrypted = !options_.tls_certificate.empty();
    environment.reaper = reaper_.get();
    environment.executor = launch_threads_.get();
    environment.clock = environment_.clock;
    environment.memory = environment_.memory;
    environment.rate = &meetings_;
    return environment;
  }

  AgentSessionContext AgentContext() {
    AgentSessionContext context;
    context.instance = instance_;
    context.node_name = node_name_;
    context.limits = options_.limits;
    context.clock = environment_.clock;
    context.worker_idle_limit_ns = options_.worker_idle_limit_ns;
    context.jobs = environment_.jobs;
    context.turns = &turns_;
    context.memory = environment_.memory;
    context.tls = !options_.tls_certificate.empty();
    context.addresses = &addresses_;
    context.caller_key = [this](const std::string& caller) { return server_->CallerAt(caller); };
    context.callers_input = [this](const std::string& caller) { return server_->InputOf(caller); };
    context.unread_bytes = [this](const std::string& caller) {
      return server_->UnreadBytes(caller);
    };
    context.own_ends = [this](const std::string& caller) { return server_->OwnEnds(caller); };
    context.sockets = &sockets_;
    context.find_node_group = [this](const JobKey& key) { return node_groups_.Find(key); };
    return context;
  }

  CoordinatorLinkTable::Options LinkOptions(const PeerCredentials& credentials,
                                            const CoordinatorList& coordinators) {
    CoordinatorLinkTable::Options options;
    options.link.instance = instance_;
    options.link.node_name = node_name_;
    options.link.address = EngineAddress();
    options.link.staging_bytes = options_.limits.staging_bytes;
    options.link.max_buckets = options_.limits.buckets;
    options.link.engine_limits = {options_.engine.lanes, options_.engine.chunk_bytes};
    options.link.make_engine = make_engine_;
    options.link.turns = &turns_;
    options.link.executor = environment_.executor;
    options.link.memory = environment_.memory;
    options.link.reaper = reaper_.get();
    options.link.clock = environment_.clock;
    options.link.here = environment_.jobs;
    options.link.tls = !options_.tls_certificate.empty();
    options.own = server_->address();
    options.default_port = DefaultPort(listen_);
    options.coordinators = coordinators;
    options.quota_jobs_per_user = options_.quota_jobs_per_user;
    options.credentials = credentials.client;
    options.tls_name = options_.tls_name;
    options.queue = server_->queue();
    options.dialed = [this] { ticker_.Wake(); };
    return options;
  }

  // Warns of what the open port allows.
  void NoteExposure() {
    if (listen_.IsLoopback()) return;
    if (options_.tls_certificate.empty()) {
      warnings_.push_back(absl::StrCat(
          "peer port ", address_,
          " is open without TLS (peer_plain_text): everyone who reaches it can join any user's "
          "jobs "
          "that have no token. Set peer_tls_certificate, peer_tls_key and peer_tls_ca, or keep "
          "others off that network."));
    }
    if (options_.tls_certificate.empty()) {
      notices_.emplace_back(
          "gradients travel between nodes in clear text: keep others off that network.");
    } else if (options_.gpus) {
      notices_.emplace_back(
          "gradients of layouts on GPUs travel between nodes in clear text, because NCCL has no "
          "TLS: "
          "keep others off that network.");
    }
    for (const auto* lines : {&warnings_, &notices_}) {
      for (const std::string& line : *lines) Log(LogLevel::kWarning, line);
    }
  }

  // False while there is no other node.
  bool Tick() {
    const std::uint64_t now_ns = environment_.clock->NowNs();
    const std::vector<std::shared_ptr<AgentSession>> nodes = server_->Sessions();
    const bool any_link = links_.DropEnded();
    const bool any_group = node_groups_.DropUnused();
    for (const auto& node : nodes) node->Tick(now_ns);
    links_.Tick(now_ns);
    node_groups_.Tick();
    environment_.jobs->Tick();
    certificates_.Look(now_ns, absl::Now());
    return !nodes.empty() || any_link || any_group;
  }

  const PeerOptions options_;
  const PeerEnvironment environment_;
  const PeerAddress listen_;  // as the options say
  const std::string instance_;
  const std::string node_name_;
  const std::string address_;  // with the port that was free if listen_ has port 0
  // Constant after construction.
  std::vector<std::string> warnings_;
  std::vector<std::string> notices_;

  std::unique_ptr<FairExecutor> turn_threads_ = std::make_unique<FairExecutor>(kTurnThreads);
  std::unique_ptr<FairExecutor> launch_threads_ = std::make_unique<FairExecutor>(kLaunchThreads);
  PeerTurns turns_{environment_.clock, turn_threads_.get()};
  EngineQuota engines_;
  AddressMemory addresses_;
  MeetingRate meetings_;
  SocketTable sockets_{environment_.clock};
  // Destroying an engine that is connecting can take 10 s. Other jobs do not wait for it.
  std::unique_ptr<ConcurrentExecutor> reaper_ =
      std::make_unique<ConcurrentExecutor>(engines_.total());
  const AgentSessionContext agent_context_;
  const std::unique_ptr<PeerServer> server_;
  const EngineMaker make_engine_;
  NodeGroupTable node_groups_;
  CoordinatorLinkTable links_;
  CertificateWatch certificates_;  // the ticker's, once it runs
  Ticker ticker_;
};

std::string NodeName(const std::string& given) {
  if (!given.empty()) return given;
  char name[65] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

PeerService::PeerService(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PeerService::~PeerService() = default;

absl::Status PeerService::Check(const PeerOptions& options) { return Prepare(options).status(); }

absl::StatusOr<std::unique_ptr<PeerService>> PeerService::Start(
    const PeerOptions& options, const PeerEnvironment& environment) {
  const auto prepared = Prepare(options);
  if (!prepared.ok()) return prepared.status();
  auto server = PeerServer::Listen(prepared->listen, prepared->credentials.server,
                                   options.tls_certificate.empty());
  if (!server.ok()) return server.status();
  auto impl = std::make_unique<Impl>(options, environment, *prepared, *std::move(server));
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
std::vector<RemoteJobSnapshot> PeerService::RemoteJobs(RemoteJobFilter wanted) {
  return impl_->RemoteJobs(wanted);
}
std::uint64_t PeerService::engines_made() const { return impl_->engines_made(); }

}  // namespace gradsync::daemon
