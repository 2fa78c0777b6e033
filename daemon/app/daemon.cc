#include "daemon/app/daemon.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_posix.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/base/error.h"
#include "daemon/base/executor.h"
#include "daemon/base/logging.h"
#include "daemon/base/version.h"
#include "daemon/config/option_table.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/peers.h"
#include "daemon/reduce/combine.h"
#include "daemon/reduce/host_reducer.h"
#include "daemon/rpc/accept_loop.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/gradsync_service.h"
#include "daemon/rpc/introspection_service.h"
#include "daemon/session/session_table.h"
#include "daemon/worker/gpu_reducer.h"
#include "daemon/worker/mps_control.h"
#include "daemon/worker/worker_supervisor.h"
#include "google/protobuf/message.h"
#include "grpc/health/v1/health.pb.h"

namespace gradsync {
namespace {

constexpr char kGradientSync[] = "gradsync.v1.GradientSync";
constexpr char kIntrospection[] = "gradsync.v1.Introspection";
constexpr int kStreamsPerConnection = 32;
constexpr int kGrpcThreads = 32;
// What is left after the drain: streams take their end, gRPC stops.
constexpr absl::Duration kTeardown = absl::Seconds(3);
constexpr absl::Duration kDrainCheck = absl::Milliseconds(5);

std::uint64_t ToNs(absl::Duration duration) {
  return static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(duration));
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// Waits for a stop signal for at most `patience`; true if one came.
bool StopSignalWithin(absl::Duration patience) {
  const sigset_t signals = StopSignals();
  const timespec limit = absl::ToTimespec(patience);
  return sigtimedwait(&signals, nullptr, &limit) > 0;
}

// A session takes about six descriptors, and shells often allow 1024.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

struct Sockets {
  ListeningSocket grpc;
  ListeningSocket fd;
};

// The service manager's sockets, by their names "grpc" and "fd", or our own.
absl::StatusOr<Sockets> OpenSockets(const Options& options) {
  char** names = nullptr;
  const int passed = sd_listen_fds_with_names(/*unset_environment=*/1, &names);
  int grpc_fd = -1, side_fd = -1;
  for (int i = 0; i < passed; ++i) {
    const std::string name = names[i];
    std::free(names[i]);
    (name == "fd" ? side_fd : grpc_fd) = SD_LISTEN_FDS_START + i;
  }
  std::free(names);
  if (passed > 0) {
    if (passed != 2 || grpc_fd < 0 || side_fd < 0 ||
        sd_is_socket(grpc_fd, AF_UNIX, SOCK_STREAM, 1) <= 0 ||
        sd_is_socket(side_fd, AF_UNIX, SOCK_SEQPACKET, 1) <= 0) {
      return absl::InvalidArgumentError(
          "LISTEN_FDS: exactly two listening Unix sockets are expected, LISTEN_FDNAMES=grpc:fd (a "
          "stream socket) and fd (a seqpacket socket)");
    }
    return Sockets{ListeningSocket::Adopt(grpc_fd), ListeningSocket::Adopt(side_fd)};
  }
  auto grpc_socket = ListeningSocket::Bind(options.socket, SOCK_STREAM, options.socket_mode);
  if (!grpc_socket.ok()) return grpc_socket.status();
  const std::string side = absl::StrCat(absl::StripSuffix(options.socket, ".sock"), "-fd.sock");
  auto fd_socket = ListeningSocket::Bind(side, SOCK_SEQPACKET, options.socket_mode);
  if (!fd_socket.ok()) return fd_socket.status();
  return Sockets{*std::move(grpc_socket), *std::move(fd_socket)};
}

SessionPolicy PolicyOf(const Options& options) {
  SessionPolicy policy;
  policy.require_token = options.require_token;
  policy.allow_overflow_uid = options.allow_overflow_uid;
  policy.lease_ns = ToNs(options.lease);
  policy.step_timeout_ns = ToNs(options.step_timeout);
  policy.staging_bytes = options.staging_bytes;
  policy.quota_sessions_per_user = options.quota_sessions_per_user;
  policy.quota_layouts_per_session = options.quota_layouts_per_session;
  return policy;
}

PeerOptions PeerOptionsOf(const Options& options) {
  PeerOptions peer;
  peer.listen = options.peer_listen;
  peer.node_name = options.node_name;
  peer.tls_certificate = options.peer_tls_certificate;
  peer.tls_key = options.peer_tls_key;
  peer.tls_ca = options.peer_tls_ca;
  peer.tls_name = options.peer_tls_name;
  peer.staging_bytes = options.staging_bytes;
  peer.max_message_bytes = options.max_message_bytes;
  peer.quota_jobs_per_user = options.quota_jobs_per_user;
  peer.limits = {options.quota_parameters_per_layout, options.quota_buckets_per_layout};
  peer.engine.lanes = static_cast<int>(options.engine_lanes);
  peer.engine.chunk_bytes = options.engine_chunk_bytes;
  peer.engine.wire = options.engine_wire_type;
  peer.engine.silence_limit = options.engine_timeout;
  peer.worker_idle_limit_ns =
      static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options.worker_idle_limit));
  return peer;
}

WorkerSupervisorOptions WorkerOptionsOf(const Options& options) {
  WorkerSupervisorOptions workers;
  workers.cuda_library = options.cuda_library;
  workers.nccl_library = options.nccl_library;
  workers.nvml_library = options.nvml_library;
  workers.mps_multiuser = options.mps_multiuser;
  workers.idle_limit_ns =
      static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options.worker_idle_limit));
  return workers;
}

// What a worker has found on this node.
void LogGpus(const absl::StatusOr<worker::Started>& found) {
  if (!found.ok()) {
    Log(LogLevel::kInfo, "no GPUs, host memory only", {{"why", found.status().message()}});
    return;
  }
  for (const worker::Device& device : found->devices()) {
    Log(LogLevel::kInfo, "GPU",
        {{"uuid", device.uuid()},
         {"name", device.name()},
         {"memory_bytes", device.memory_bytes()},
         {"mps", device.mps()},
         {"overlap", device.mps() ? "through MPS" : "time-sliced without MPS"}});
  }
  Log(LogLevel::kInfo, "CUDA",
      {{"driver",
        absl::StrCat(found->driver_version() / 1000, ".", found->driver_version() % 1000 / 10)},
       {"nccl", found->nccl_version()}});
  if (found->nccl_version().empty()) {
    Log(LogLevel::kWarning, "no NCCL: a job's trainers must share one GPU",
        {{"why", found->nccl_error()}});
  }
}

}  // namespace

// In order of construction; destroyed from the last to the first. What serves stops before what it
// serves from.
struct Daemon::Rooms {
  explicit Rooms(const Options& given)
      : options(given),
        quota(given.quota_arena_bytes_per_user),
        gpu_quota(given.quota_gpu_bytes_per_user, "quota_gpu_bytes_per_user", "GPU memory"),
        reducer(std::make_unique<HostReducer>(given.reduce_threads > 0
                                                  ? static_cast<int>(given.reduce_threads)
                                                  : HostReducer::DefaultThreads())),
        executor(std::make_unique<SerialExecutor>()),
        copier(std::make_unique<SerialExecutor>()),
        workers(WorkerSupervisor::Make(
            WorkerOptionsOf(given),
            [this](const WorkerKey& key, const absl::Status& why) {
              sessions.WorkerLost(key, why);
            },
            &clock, &worker_reaper)),
        gpu_reducer(given.gate),
        jobs(JobEnvironment{&clock, reducer.get(), copier.get(), given.quota_buckets_per_layout,
                            NodeName(given.node_name), &gpu_reducer},
             given.quota_jobs_per_user),
        sessions(PolicyOf(given), &jobs, &quota, executor.get(), &clock) {
    sessions.UseGpus({workers.get(), &gpu_quota});
    sessions.FenceWith([this](const PeerProcess& trainer) { Fence(trainer); });
  }

  // A stopped trainer would go on with kernels that are in its streams, in memory that others
  // share.
  void Fence(const PeerProcess& trainer) {
    const auto found = workers->Found();
    const bool mps = found.ok() && std::any_of(found->devices().begin(), found->devices().end(),
                                               [](const auto& device) { return device.mps(); });
    if (!mps || options.mps_control.empty() || trainer.pidfd == nullptr || trainer.pid <= 0) return;
    MpsControlOptions control;
    control.program = options.mps_control;
    worker_reaper.Run([control, trainer] {
      const absl::Status status = TerminateMpsClient(
          control, trainer.pid, [&trainer] { return !HasEnded(trainer, /*patience_ms=*/0); });
      Log(LogLevel::kWarning, "a lost trainer still lives, as a client of MPS",
          {{"pid", trainer.pid}, {"terminate_client", status.ok() ? "done" : status.message()}});
    });
  }

  const Options options;
  MonotonicClock clock;
  ArenaQuota quota;
  ArenaQuota gpu_quota;
  // Both run what belongs to jobs and sessions: ~Daemon() empties them before those go.
  std::unique_ptr<HostReducer> reducer;
  std::unique_ptr<SerialExecutor> executor;  // maps and unmaps for sessions: seconds, at worst
  std::unique_ptr<SerialExecutor> copier;    // copies for jobs, which must not wait for that
  SerialExecutor worker_reaper;              // waits for workers' ends
  std::shared_ptr<WorkerSupervisor> workers;
  GpuReducer gpu_reducer;
  JobTable jobs;
  SessionTable sessions;
  std::unique_ptr<Peers> peers;  // null: no other nodes
  Connections connections;
  std::unique_ptr<GradsyncService> gradsync_service;
  std::unique_ptr<grpc::Service> introspection_service;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<AcceptLoop> accept_loop;
};

void Daemon::BlockSignals() {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  // A client that goes away while it is written to is an error code, not the daemon's end.
  signal(SIGPIPE, SIG_IGN);
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Options& options) {
  RaiseDescriptorLimit();
  auto sockets = OpenSockets(options);
  if (!sockets.ok()) return sockets.status();

  auto rooms = std::make_unique<Rooms>(options);
  Rooms& r = *rooms;
  if (!options.peer_listen.empty()) {
    PeerEnvironment environment;
    environment.jobs = &r.jobs;
    environment.executor = r.executor.get();
    environment.clock = &r.clock;
    environment.make_engine = MakeGlooEngine;
    auto peers = Peers::Start(PeerOptionsOf(options), environment);
    if (!peers.ok()) return peers.status();
    r.peers = *std::move(peers);
    r.sessions.JoinThrough(r.peers.get());
  }
  r.gradsync_service = std::make_unique<GradsyncService>(
      ServiceContext{&r.sessions,
                     &r.connections,
                     &r.clock,
                     {options.quota_parameters_per_layout, options.quota_buckets_per_layout},
                     absl::StrCat("gradsyncd ", kVersion)});
  IntrospectionContext introspection;
  introspection.sessions = &r.sessions;
  introspection.jobs = &r.jobs;
  introspection.quota = &r.quota;
  introspection.workers = r.workers.get();
  introspection.gpu_reducer = &r.gpu_reducer;
  introspection.gpu_quota = &r.gpu_quota;
  introspection.gate = FindOption("gate")->format(options);
  introspection.connections = &r.connections;
  introspection.clock = &r.clock;
  introspection.started_ns = r.clock.NowNs();
  introspection.version = std::string(kVersion);
  introspection.socket = options.socket;
  introspection.reduce_threads = static_cast<std::uint32_t>(r.reducer->threads());
  introspection.simd = CombineTarget();
  if (r.peers != nullptr) {
    introspection.peer_address = r.peers->address();
    introspection.node_name = r.peers->node_name();
    introspection.nodes = r.peers.get();
    introspection.warnings = r.peers->warnings();
    introspection.notices = r.peers->notices();
  }
  r.introspection_service = MakeIntrospectionService(std::move(introspection));

  // Never given back: gRPC's last shutdown joins its poller of writes that found a full socket, and
  // that one may sleep for 10 s more. SIGTERM is to be answered within 30 s.
  grpc_init();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  // gRPC serves the health protocol without its descriptor; this keeps ours for reflection.
  google::protobuf::LinkMessageReflection<grpc::health::v1::HealthCheckRequest>();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  // Bounds what a connection may hold open, and the threads of the synchronous services (reflection
  // and Introspection), of which one call may pin one.
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
  builder.SetResourceQuota(grpc::ResourceQuota("gradsyncd").SetMaxThreads(kGrpcThreads));
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  r.gradsync_service->Register(&builder);
  builder.RegisterService(r.introspection_service.get());
  r.server = builder.BuildAndStart();
  if (r.server == nullptr) return absl::InternalError("gRPC's server did not start");
  r.gradsync_service->Start();
  std::unique_ptr<Daemon> daemon(new Daemon(std::move(rooms)));  // from here on it tears down
  for (const char* service : {kGradientSync, kIntrospection}) {
    r.server->GetHealthCheckService()->SetServingStatus(service, true);
  }

  AcceptLoop::Hooks hooks;
  hooks.connected = [&r](int fd) { grpc::AddInsecureChannelFromFd(r.server.get(), fd); };
  hooks.tick = [&r] {
    r.sessions.Tick();
    r.gradsync_service->Tick(r.clock.NowNs());
    return r.workers->Tick();
  };
  std::uint64_t watchdog_us = 0;
  if (sd_watchdog_enabled(/*unset_environment=*/0, &watchdog_us) > 0) {
    hooks.watchdog_period = absl::Microseconds(watchdog_us) / 2;
    hooks.watchdog = [] { sd_notify(0, "WATCHDOG=1"); };
  }
  auto loop = AcceptLoop::Start(std::move(sockets->grpc), std::move(sockets->fd), &r.connections,
                                &r.sessions, std::move(hooks));
  if (!loop.ok()) return loop.status();
  r.accept_loop = *std::move(loop);

  Log(LogLevel::kInfo, "serving",
      {{"version", kVersion},
       {"socket", options.socket},
       {"reduce_threads", r.reducer->threads()},
       {"simd", CombineTarget()}});
  r.workers->Probe(LogGpus);
  sd_notify(0, "READY=1\nSTATUS=Serving");
  return daemon;
}

Daemon::Daemon(std::unique_ptr<Rooms> rooms) : rooms_(std::move(rooms)) {}

void Daemon::ServeUntilSignal() {
  Rooms& r = *rooms_;
  const sigset_t signals = StopSignals();
  int signal_number = 0;
  sigwait(&signals, &signal_number);

  Log(LogLevel::kInfo, "draining", {{"signal", strsignal(signal_number)}});
  sd_notify(0, "STOPPING=1\nSTATUS=Draining");
  r.server->GetHealthCheckService()->SetServingStatus(false);
  r.sessions.Drain();
  const absl::Status why = MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                                     "the daemon is stopping; join again when it is back");
  absl::Time deadline = absl::Now() + r.options.drain_timeout;
  bool hurry = false;
  // Job by job: each ends at its own first moment between two steps.
  const auto end_idle = [&] {
    const bool elsewhere = r.peers == nullptr || r.peers->EndIdle(why);
    return r.jobs.EndIdle(why) && elsewhere;
  };
  while (!hurry && !end_idle() && absl::Now() < deadline) {
    hurry = StopSignalWithin(kDrainCheck);
  }
  r.jobs.EndAll(why);
  if (r.peers != nullptr) r.peers->EndAll(why);
  deadline = absl::Now() + kTeardown;
  while (!hurry && !r.gradsync_service->Idle() && absl::Now() < deadline) {
    hurry = StopSignalWithin(kDrainCheck);
  }
  Log(LogLevel::kInfo, "stopped", {{"sessions_open", r.sessions.Sessions().size()}});
}

Daemon::~Daemon() {
  Rooms& r = *rooms_;
  r.accept_loop.reset();                                 // no new connection, no tick
  r.server->Shutdown(std::chrono::system_clock::now());  // cancels what is left
  r.gradsync_service->Stop();
  r.server->Wait();
  r.server.reset();
  r.peers.reset();
  r.workers->Shutdown();
  r.reducer.reset();
  r.executor.reset();
  r.copier.reset();
}

}  // namespace gradsync
