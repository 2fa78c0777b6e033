#include "daemon/app/daemon.h"

#include <grpc/grpc.h>
#include <grpcpp/health_check_service_interface.h>
#include <signal.h>
#include <sys/resource.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/app/room_options.h"
#include "daemon/app/sockets.h"
#include "daemon/base/error.h"
#include "daemon/base/executor.h"
#include "daemon/base/fair_executor.h"
#include "daemon/base/heap_trimmer.h"
#include "daemon/base/logging.h"
#include "daemon/base/tenant.h"
#include "daemon/base/trim_ticker.h"
#include "daemon/base/version.h"
#include "daemon/config/option_table.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/peer_service.h"
#include "daemon/reduce/combine.h"
#include "daemon/reduce/host_reducer.h"
#include "daemon/reduce/turn_gate.h"
#include "daemon/rpc/accept_loop.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/grpc_log.h"
#include "daemon/rpc/user_servers.h"
#include "daemon/session/descriptor_quota.h"
#include "daemon/session/pod_place.h"
#include "daemon/session/session_table.h"
#include "daemon/worker/engine_priorities.h"
#include "daemon/worker/gpu_reducer.h"
#include "daemon/worker/mps_control.h"
#include "daemon/worker/worker_supervisor.h"

namespace gradsync::daemon {
namespace {

// With two threads, one user's long work leaves one for the others.
constexpr int kMappers = 2;
constexpr int kCopiers = 2;
// Workers on GPUs that end at the same time. More of them end one after the other.
constexpr std::size_t kWorkerReapers = 16;
constexpr int kAnswerers = 2;
// Timelines are long. So the work on one user's answers takes at most a quarter of a CPU.
constexpr int kAnswerRest = 3;
// Time after the drain in which clients read the ends of their streams and gRPC stops.
constexpr absl::Duration kTeardown = absl::Seconds(3);
constexpr absl::Duration kDrainCheck = absl::Milliseconds(5);

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// Waits for a stop signal for at most `patience`. True if one has come.
bool StopSignalWithin(absl::Duration patience) {
  const sigset_t signals = StopSignals();
  const timespec limit = absl::ToTimespec(patience);
  return sigtimedwait(&signals, nullptr, &limit) > 0;
}

// How many memory mappings Linux allows a process.
std::size_t MaxMapCount() {
  constexpr std::size_t kDefault = 65530;
  std::size_t count = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> count;
  return count > 0 ? count : kDefault;
}

// Raises the limit of descriptors as far as the system allows: a session needs about six, and
// shells often allow 1024. But the limit stays below that of mappings.
void SetDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = DescriptorQuota::LimitOfProcess(limit.rlim_max, MaxMapCount());
  setrlimit(RLIMIT_NOFILE, &limit);
}

// The pod of this daemon; none if it is in no pod, or cannot tell.
PodId OwnPod() {
  const auto cgroups = ReadCgroups(getpid());
  return cgroups.ok() ? PodPlaceIn(*cgroups).pod : PodId();
}

// Logs the GPUs and libraries that a worker has found.
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

// The rooms in the order of their construction. Each is destroyed before those that it uses.
struct Daemon::Rooms {
  explicit Rooms(const Options& given)
      : options(given),
        quota(given.quota_arena_bytes_per_user),
        gpu_quota(given.quota_gpu_bytes_per_user, "quota_gpu_bytes_per_user", "GPU memory"),
        control_quota(given.quota_control_bytes_per_user, "quota_control_bytes_per_user",
                      "the daemon's own memory"),
        engine_quota(given.quota_engine_bytes_per_user, "quota_engine_bytes_per_user",
                     "memory for engines between nodes"),
        reducer(std::make_unique<HostReducer>(given.reduce_threads > 0
                                                  ? static_cast<int>(given.reduce_threads)
                                                  : HostReducer::DefaultThreads())),
        lane_turns(std::max(reducer->threads(), static_cast<int>(given.engine_lanes))),
        executor(std::make_unique<FairExecutor>(kMappers)),
        copier(std::make_unique<FairExecutor>(kCopiers)),
        workers(WorkerSupervisor::Make(
            WorkerOptionsOf(given),
            [this](const WorkerKey& key, const absl::Status& why) {
              sessions.WorkerLost(key, why);
            },
            &clock, &worker_reaper)),
        gpu_reducer(given.gate),
        jobs(JobEnvironment{&clock, reducer.get(), copier.get(), given.quota_buckets_per_layout,
                            &control_quota, NodeName(given.node_name), &gpu_reducer,
                            [](uid_t uid, const std::string& job_id, const std::string& text) {
                              LogLimited(LogLevel::kWarning, "ranks wait for others",
                                         {{"job", job_id}, {"uid", uid}, {"waits", text}});
                            },
                            [](uid_t uid, const std::string& job_id) {
                              LogLimited(LogLevel::kWarning,
                                         "ranks of one job id have different tokens",
                                         {{"job", job_id}, {"uid", uid}});
                            }},
             given.quota_jobs_per_user),
        sessions(SessionPolicyOf(given), &jobs, &quota, executor.get(), &clock) {
    sessions.UseGpus({workers.get(), &gpu_quota});
    sessions.LimitDescriptors(&descriptors);
    sessions.FenceWith([this](const ClientProcess& trainer) { Fence(trainer); });
  }

  // ---- The steps of Daemon::Start(), in this order.
  absl::Status StartPeers();
  void MakeServers();
  absl::Status StartAccepting(Sockets sockets);

  // Ends the MPS client of a lost trainer whose process still lives. Otherwise its stream could go
  // on with kernels in memory that others use.
  void Fence(const ClientProcess& trainer) {
    const auto found = workers->Found();
    const bool mps = found.ok() && std::any_of(found->devices().begin(), found->devices().end(),
                                               [](const auto& device) { return device.mps(); });
    if (!mps || options.mps_control.empty() || trainer.pidfd == nullptr || trainer.pid <= 0) return;
    MpsControlOptions control;
    control.program = options.mps_control;
    errands.Run([control, trainer] {
      const absl::Status status = TerminateMpsClient(
          control, trainer.pid, [&trainer] { return !HasEnded(trainer, /*patience_ms=*/0); });
      Log(LogLevel::kWarning, "ending the MPS client of a lost trainer",
          {{"pid", trainer.pid}, {"terminate_client", status.ok() ? "done" : status.message()}});
    });
  }

  const Options options;
  MonotonicClock clock;
  ArenaQuota quota;
  ArenaQuota gpu_quota;
  ArenaQuota control_quota;
  ArenaQuota engine_quota;
  // These run work of jobs and sessions, so ~Daemon() finishes them before it destroys those.
  std::unique_ptr<HostReducer> reducer;
  TurnGate lane_turns;  // enough at once, so that the lanes of a job do not wait for each other
  EnginePriorities engine_priorities;
  std::unique_ptr<FairExecutor> executor;  // maps for sessions
  std::unique_ptr<FairExecutor> copier;    // copies and unmaps for jobs, which must not wait
  HeapTrimmer trimmer{&errands};           // before its executor, which runs to the end first
  SerialExecutor errands;                  // ends users' servers, trims, fences lost trainers
  // Waits for the ends of workers. A driver may take long, and others do not wait for it.
  ConcurrentExecutor worker_reaper{kWorkerReapers};
  TrimTicker trims{&trimmer, &clock};  // outlives those who tell it that they use the daemon
  std::shared_ptr<WorkerSupervisor> workers;
  GpuReducer gpu_reducer;
  JobTable jobs;
  SessionTable sessions;
  DescriptorQuota descriptors{DescriptorQuota::PerUserOfProcess()};
  std::unique_ptr<PeerService> peers;  // null: no other nodes
  Connections connections{&descriptors};
  // Works out answers of Introspection, from the rooms above and from `servers`. So ~Daemon()
  // finishes it before it destroys any of them.
  std::unique_ptr<FairExecutor> answerer = std::make_unique<FairExecutor>(kAnswerers, kAnswerRest);
  std::unique_ptr<UserServers> servers;
  std::unique_ptr<AcceptLoop> accept_loop;
};

void Daemon::BlockSignals() {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  // A write to a client that has ended must fail, not end the daemon.
  signal(SIGPIPE, SIG_IGN);
}

absl::Status Daemon::Rooms::StartPeers() {
  if (options.peer_listen.empty()) return absl::OkStatus();
  PeerEnvironment environment;
  environment.jobs = &jobs;
  environment.memory = &control_quota;
  environment.engine_memory = &engine_quota;
  environment.executor = executor.get();
  environment.clock = &clock;
  environment.make_engine = [this](const EngineSpec& spec) {
    return MakeEngineProcess(spec, &lane_turns, &engine_priorities);
  };
  environment.descriptors = &descriptors;
  environment.used = [this] { trims.Used(); };
  auto started = PeerService::Start(PeerOptionsOf(options), environment);
  if (!started.ok()) return started.status();
  peers = *std::move(started);
  sessions.JoinThrough(peers.get());
  return absl::OkStatus();
}

void Daemon::Rooms::MakeServers() {
  // Without a grpc_shutdown(): the last one joins gRPC's poller of writes that found a full socket,
  // which may sleep for 10 s more, and the whole stop may take kStopLimit.
  grpc_init();
  // Ours answers: asking_service.h says why.
  grpc::EnableDefaultHealthCheckService(false);
  UserServers::Environment environment;
  environment.sessions = {&sessions, &clock, DecodeLimitsOf(options),
                          absl::StrCat("gradsyncd ", kVersion), &control_quota};
  environment.connections = &connections;
  environment.answerer = answerer.get();
  environment.reaper = &errands;
  IntrospectionContext& context = environment.introspection;
  context.sessions = &sessions;
  context.jobs = &jobs;
  context.quota = &quota;
  context.workers = workers.get();
  context.gpu_reducer = &gpu_reducer;
  context.gpu_quota = &gpu_quota;
  context.control_quota = &control_quota;
  context.engine_quota = &engine_quota;
  context.gate = FindOption("gate")->format(options);
  context.pod = OwnPod();
  context.pod_root_sees_all = options.pod_root_sees_all;
  context.clock = &clock;
  context.started_ns = clock.NowNs();
  context.version = std::string(kVersion);
  context.socket = options.socket;
  context.reduce_threads = static_cast<std::uint32_t>(reducer->threads());
  context.simd = CombineTarget();
  if (peers != nullptr) {
    context.peer_address = peers->address();
    context.node_name = peers->node_name();
    context.nodes = peers.get();
    context.warnings = peers->warnings();
    context.notices = peers->notices();
  }
  servers = std::make_unique<UserServers>(std::move(environment));
}

absl::Status Daemon::Rooms::StartAccepting(Sockets sockets) {
  AcceptLoop::Hooks hooks;
  hooks.connected = [this](Connections::Admitted connection, const Tenant& user) {
    return servers->Connect(std::move(connection), user);
  };
  hooks.tick = [this] {
    sessions.Tick();
    const bool any_server = servers->Tick(clock.NowNs());
    const bool any_worker = workers->Tick();
    if (any_server || any_worker || !sessions.Sessions().empty()) trims.Used();
    return any_server || any_worker;
  };
  std::uint64_t watchdog_us = 0;
  if (sd_watchdog_enabled(/*unset_environment=*/0, &watchdog_us) > 0) {
    hooks.watchdog_period = absl::Microseconds(watchdog_us) / 2;
    hooks.watchdog = [] { sd_notify(0, "WATCHDOG=1"); };
  }
  auto started = AcceptLoop::Start(std::move(sockets.grpc), std::move(sockets.fd), &connections,
                                   &sessions, std::move(hooks));
  if (!started.ok()) return started.status();
  accept_loop = *std::move(started);
  return absl::OkStatus();
}

absl::Status Daemon::Check(const Options& options) {
  absl::Status status = CheckSockets(options);
  if (!status.ok() || options.peer_listen.empty()) return status;
  return PeerService::Check(PeerOptionsOf(options));
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Options& options, StopGuard* guard) {
  SetDescriptorLimit();
  LogWhatGrpcSays();
  auto sockets = OpenSockets(options);
  if (!sockets.ok()) return sockets.status();
  auto rooms = std::make_unique<Rooms>(options);
  if (absl::Status status = rooms->StartPeers(); !status.ok()) return status;
  rooms->MakeServers();
  // Its destructor stops the server.
  std::unique_ptr<Daemon> daemon(new Daemon(std::move(rooms), guard));
  Rooms& r = *daemon->rooms_;
  if (absl::Status status = r.StartAccepting(*std::move(sockets)); !status.ok()) return status;
  Log(LogLevel::kInfo, "serving",
      {{"version", kVersion},
       {"socket", options.socket},
       {"reduce_threads", r.reducer->threads()},
       {"simd", CombineTarget()}});
  r.workers->Probe(LogGpus);
  sd_notify(0, "READY=1\nSTATUS=Serving");
  return daemon;
}

Daemon::Daemon(std::unique_ptr<Rooms> rooms, StopGuard* guard)
    : guard_(guard), rooms_(std::move(rooms)) {}

void Daemon::ServeUntilSignal() {
  Rooms& r = *rooms_;
  const sigset_t signals = StopSignals();
  int signal_number = 0;
  sigwait(&signals, &signal_number);

  guard_->Enter("draining");
  guard_->Allow(r.options.drain_timeout + kStopLimit);
  Log(LogLevel::kInfo, "draining", {{"signal", strsignal(signal_number)}});
  sd_notify(0, "STOPPING=1\nSTATUS=Draining");
  r.servers->Drain();
  r.sessions.Drain();
  const std::string node = NodeName(r.options.node_name);
  const absl::Status why = MakeError(
      absl::StatusCode::kUnavailable, reason::kDraining,
      absl::StrCat("the daemon of node ", node, " is stopping; join again when it is back"),
      {{field::kNode, node}});
  // Not by the wall clock, which may be set meanwhile.
  const auto after = [](absl::Duration patience) {
    return MonotonicNowNs() + static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(patience));
  };
  std::uint64_t deadline_ns = after(r.options.drain_timeout);
  bool hurry = false;
  // Each job ends as soon as it is between two steps.
  const auto end_idle = [&] {
    const bool elsewhere = r.peers == nullptr || r.peers->EndIdle(why);
    return r.jobs.EndIdle(why) && elsewhere;
  };
  while (!hurry && !end_idle() && MonotonicNowNs() < deadline_ns) {
    hurry = StopSignalWithin(kDrainCheck);
  }
  guard_->Enter("ending the sessions");
  guard_->Allow(kStopLimit);
  r.jobs.EndAll(why);
  if (r.peers != nullptr) r.peers->EndAll(why);
  deadline_ns = after(kTeardown);
  while (!hurry && !r.servers->Idle() && MonotonicNowNs() < deadline_ns) {
    hurry = StopSignalWithin(kDrainCheck);
  }
  Log(LogLevel::kInfo, "stopped", {{"sessions_open", r.sessions.Sessions().size()}});
}

Daemon::~Daemon() {
  Rooms& r = *rooms_;
  guard_->Enter("stopping the accept loop");
  r.accept_loop.reset();  // no new connection, no tick
  guard_->Enter("stopping the users' servers");
  r.servers->Stop();  // cancels the streams that are left
  guard_->Enter("finishing the answers");
  r.answerer.reset();
  guard_->Enter("leaving the other nodes");
  r.peers.reset();
  guard_->Enter("stopping the workers");
  r.workers->Shutdown();
  guard_->Enter("finishing the reductions");
  r.reducer.reset();
  guard_->Enter("finishing the executor's work");
  r.executor.reset();
  guard_->Enter("finishing the copier's work");
  r.copier.reset();
  guard_->Enter("destroying the rooms");
  rooms_.reset();
}

}  // namespace gradsync::daemon
