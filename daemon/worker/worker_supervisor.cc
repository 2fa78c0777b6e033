#include "daemon/worker/worker_supervisor.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

absl::Status Stopping() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the daemon is stopping");
}

absl::Status NoGpus() {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kCudaDriverMissing,
                   "gradsyncd uses no GPUs: its option cuda_library is 'none'; remove the option "
                   "to use them");
}

// True if the worker refused its GPU, the driver or the job. Such a start is not delayed next time:
// once the cause is removed, it can succeed at once.
bool IsRefusal(const absl::Status& status) {
  return status.code() == absl::StatusCode::kFailedPrecondition ||
         status.code() == absl::StatusCode::kInvalidArgument;
}

}  // namespace

std::shared_ptr<WorkerSupervisor> WorkerSupervisor::Make(WorkerSupervisorOptions options, Lost lost,
                                                         const Clock* clock, Executor* executor) {
  return std::shared_ptr<WorkerSupervisor>(
      new WorkerSupervisor(std::move(options), std::move(lost), clock, executor));
}

WorkerSupervisor::WorkerSupervisor(WorkerSupervisorOptions options, Lost lost, const Clock* clock,
                                   Executor* executor)
    : options_(std::move(options)),
      lost_(std::move(lost)),
      clock_(clock),
      executor_(executor),
      turns_(options_.starting_at_once_per_user) {}

// Stops the workers without the lock: their threads may be about to take it.
WorkerSupervisor::~WorkerSupervisor() {
  std::map<WorkerKey, Worker> workers;
  std::shared_ptr<WorkerProcess> probe;
  {
    const MutexLock lock(&mutex_);
    workers.swap(workers_);
    probe.swap(probe_);
  }
  for (auto& [key, worker] : workers) GiveUp(&worker);
}

void WorkerSupervisor::Ensure(const WorkerKey& key, const Ready& ready) {
  std::shared_ptr<WorkerProcess> started;
  std::uint64_t incarnation = 0;
  absl::StatusOr<std::shared_ptr<WorkerProcess>> at_once = nullptr;
  {
    const MutexLock lock(&mutex_);
    const auto found = workers_.find(key);
    Worker* worker = found != workers_.end() ? &found->second : nullptr;
    absl::Status status;
    if (worker == nullptr || (worker->process == nullptr && !worker->queued.has_value())) {
      status = MayStartLocked(key, worker);
      if (status.ok()) {
        if (worker == nullptr) ForgetEndedLocked(key.user);
        worker = &workers_[key];
        status = QueueLocked(key, worker);
        started = worker->process;
        incarnation = worker->incarnation;
      }
    }
    if (!status.ok()) {
      at_once = status;
    } else if (worker->open && !worker->process->HasEnded()) {
      at_once = worker->process;
    } else {
      worker->waiting.push_back({key, ready});
    }
  }
  if (started != nullptr) {
    SendStart(key, incarnation, started);
    return;
  }
  if (!at_once.ok() || *at_once != nullptr) ready(std::move(at_once));
}

// Without the lock: if the process has ended already, the answer comes from within.
void WorkerSupervisor::SendStart(const WorkerKey& key, std::uint64_t incarnation,
                                 const std::shared_ptr<WorkerProcess>& process) {
  process->Call(
      StartCall(key), {},
      [weak = weak_from_this(), key, incarnation](absl::StatusOr<WorkerProcess::Reply> reply) {
        if (const auto self = weak.lock()) self->OnStarted(key, incarnation, std::move(reply));
      });
}

void WorkerSupervisor::ForgetEndedLocked(const Tenant& user) {
  std::map<std::uint64_t, std::map<WorkerKey, Worker>::iterator> ended;  // the oldest are first
  for (auto it = workers_.begin(); it != workers_.end(); ++it) {
    const auto& [key, worker] = *it;
    if (key.user != user || worker.process != nullptr || !worker.waiting.empty()) continue;
    ended.emplace(worker.incarnation, it);
  }
  while (ended.size() > options_.max_ended_per_user) {
    workers_.erase(ended.begin()->second);
    ended.erase(ended.begin());
  }
}

absl::Status WorkerSupervisor::MayStartLocked(const WorkerKey& key, const Worker* worker) const {
  if (shut_down_) return Stopping();
  if (options_.cuda_library == WorkerSupervisorOptions::kNoGpus) return NoGpus();
  if (worker != nullptr) {
    if (const absl::Status status = worker->policy.MayStart(clock_->NowNs()); !status.ok()) {
      return status;
    }
  }
  const std::size_t starting = starting_->CountOf(key.user);
  if (starting < options_.max_starting_per_user) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kWorkersStarting,
                   absl::StrCat(starting, " workers of user ", key.user.Text(),
                                " are starting, waiting to start or ending on this node, as many "
                                "as a user may have: try again in a few seconds, and register "
                                "layouts only on GPUs that exist (nvidia-smi -L)"));
}

absl::Status WorkerSupervisor::QueueLocked(const WorkerKey& key, Worker* worker) {
  worker->incarnation = ++last_incarnation_;
  starting_->Add(key.user, worker->incarnation);
  if (!turns_.Ask(key.user, worker->incarnation, clock_->NowNs())) {
    worker->queued = key;
    return absl::OkStatus();
  }
  absl::Status status = StartLocked(key, worker);
  // It had its turn at once, so none waits.
  if (!status.ok()) turns_.End(key.user, worker->incarnation, clock_->NowNs());
  return status;
}

void WorkerSupervisor::StartWaiting(std::uint64_t incarnation) {
  for (std::optional<std::uint64_t> next = incarnation; next.has_value();) {
    WorkerKey key;
    std::shared_ptr<WorkerProcess> process;
    std::vector<Waiting> waiting;
    absl::Status status;
    {
      const MutexLock lock(&mutex_);
      const auto found = std::find_if(workers_.begin(), workers_.end(), [&next](const auto& one) {
        return one.second.incarnation == *next;
      });
      if (found == workers_.end()) return;  // after Shutdown
      incarnation = *next;
      next = std::nullopt;
      Worker& worker = found->second;
      key = *std::exchange(worker.queued, std::nullopt);
      status = StartLocked(key, &worker);
      process = worker.process;
      if (!status.ok()) {
        next = turns_.End(key.user, incarnation, clock_->NowNs());
        waiting.swap(worker.waiting);
        ++callbacks_;  // Shutdown waits for the following callbacks
      }
    }
    if (status.ok()) {
      SendStart(key, incarnation, process);
    } else {
      for (const Waiting& caller : waiting) caller.ready(status);
      EndCallback();
    }
  }
}

absl::Status WorkerSupervisor::StartLocked(const WorkerKey& key, Worker* worker) {
  WorkerProcessOptions options = options_.process;
  // The driver shows a process one MIG instance: the one that is named here.
  if (absl::StartsWith(key.device, "MIG-")) {
    options.environment.push_back(absl::StrCat("CUDA_VISIBLE_DEVICES=", key.device));
  }
  const std::uint64_t incarnation = worker->incarnation;
  auto process = WorkerProcess::Start(
      std::move(options), [weak = weak_from_this(), key, incarnation](const absl::Status& why) {
        if (const auto self = weak.lock()) self->OnEnded(key, incarnation, why);
      });
  if (!process.ok()) {
    starting_->Remove(key.user, incarnation);
    worker->policy.Failed(clock_->NowNs(), process.status());
    return process.status();
  }
  worker->process =
      Share(*std::move(process), [starting = starting_, user = key.user, incarnation] {
        starting->Remove(user, incarnation);
      });
  if (worker->policy.failures() > 0) ++worker->restarts;
  return absl::OkStatus();
}

worker::Call WorkerSupervisor::StartCall(const WorkerKey& key) const {
  worker::Call call;
  worker::Start* const start = call.mutable_start();
  start->set_cuda_library(options_.cuda_library);
  start->set_nccl_library(options_.nccl_library);
  start->set_nvml_library(options_.nvml_library);
  start->set_device(key.device);
  start->set_user(key.user.uid);
  start->set_mps_multiuser(options_.mps_multiuser);
  start->set_operation_limit_ns(
      static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options_.operation_limit)));
  return call;
}

void WorkerSupervisor::OnStarted(const WorkerKey& key, std::uint64_t incarnation,
                                 absl::StatusOr<WorkerProcess::Reply> reply) {
  std::vector<Waiting> waiting;
  absl::StatusOr<std::shared_ptr<WorkerProcess>> result = nullptr;
  std::optional<std::uint64_t> next;
  {
    const MutexLock lock(&mutex_);
    ++callbacks_;  // Shutdown waits for the following callbacks
    next = turns_.End(key.user, incarnation, clock_->NowNs());
    if (Worker* const worker = FindLocked(key, incarnation)) {
      waiting.swap(worker->waiting);
      if (reply.ok()) {
        worker->open = true;
        starting_->Remove(key.user, incarnation);
        worker->started = reply->message.started();
        worker->checked_ns = clock_->NowNs();
        worker->policy.Started(worker->checked_ns);
        result = worker->process;
      } else {
        // Keeps no process: at the next try the GPU may exist.
        if (IsRefusal(reply.status())) {
          worker->policy.Refused(clock_->NowNs(), reply.status());
        } else {
          worker->policy.Failed(clock_->NowNs(), reply.status());
        }
        worker->process.reset();
        result = reply.status();
      }
    }
  }
  for (std::size_t i = 0; i + 1 < waiting.size(); ++i) waiting[i].ready(result);
  // The last one gets the only reference, so that the worker is idle as soon as it is dropped.
  if (!waiting.empty()) waiting.back().ready(std::move(result));
  if (next.has_value()) StartWaiting(*next);
  EndCallback();
}

void WorkerSupervisor::OnEnded(const WorkerKey& key, std::uint64_t incarnation,
                               const absl::Status& why) {
  std::vector<Waiting> waiting;
  {
    const MutexLock lock(&mutex_);
    Worker* const worker = FindLocked(key, incarnation);
    // One that has not opened its GPU: OnStarted comes, and answers those that wait.
    if (worker == nullptr || !worker->open) return;
    worker->policy.Failed(clock_->NowNs(), why);
    worker->open = false;
    worker->process.reset();
    waiting.swap(worker->waiting);
    ++callbacks_;  // Shutdown waits for the following callbacks
  }
  lost_(key, why);
  for (const Waiting& caller : waiting) Ensure(caller.key, caller.ready);
  EndCallback();
}

bool WorkerSupervisor::BeginCallback() {
  const MutexLock lock(&mutex_);
  if (!shut_down_) ++callbacks_;
  return !shut_down_;
}

void WorkerSupervisor::EndCallback() {
  const MutexLock lock(&mutex_);
  if (--callbacks_ == 0) no_callbacks_.NotifyAll();
}

WorkerSupervisor::Worker* WorkerSupervisor::FindLocked(const WorkerKey& key,
                                                       std::uint64_t incarnation) {
  const auto found = workers_.find(key);
  if (found == workers_.end() || found->second.incarnation != incarnation) return nullptr;
  return &found->second;
}

std::shared_ptr<WorkerProcess> WorkerSupervisor::Share(std::unique_ptr<WorkerProcess> process,
                                                       std::function<void()> destroyed) const {
  return std::shared_ptr<WorkerProcess>(
      process.release(),
      [executor = executor_, destroyed = std::move(destroyed)](WorkerProcess* last) {
        last->BeginStop();
        executor->Run([last, destroyed] {
          delete last;
          destroyed();
        });
      });
}

bool WorkerSupervisor::Tick() {
  std::vector<std::uint64_t> next;
  {
    const MutexLock lock(&mutex_);
    next = turns_.EndOverdue(clock_->NowNs(), options_.turn_limit_ns);
  }
  for (const std::uint64_t incarnation : next) StartWaiting(incarnation);
  const MutexLock lock(&mutex_);
  const std::uint64_t now_ns = clock_->NowNs();
  for (auto it = workers_.begin(); it != workers_.end();) {
    Worker& worker = it->second;
    // A worker that has ended stays in the table for its RestartPolicy. A running worker is idle if
    // the table has the only reference.
    const bool idle = worker.process == nullptr ? worker.waiting.empty()
                                                : worker.open && worker.waiting.empty() &&
                                                      worker.process.use_count() == 1;
    if (!idle) {
      worker.idle_since_ns = 0;
    } else if (worker.idle_since_ns == 0) {
      worker.idle_since_ns = now_ns;
    } else if (now_ns - worker.idle_since_ns > options_.idle_limit_ns) {
      it = workers_.erase(it);
      continue;
    }
    if (worker.open && now_ns - worker.checked_ns >= options_.check_interval_ns) {
      worker.checked_ns = now_ns;
      PingLocked(&worker, /*memory=*/false, [](const auto&) {});
    }
    ++it;
  }
  return !workers_.empty();
}

void WorkerSupervisor::Shutdown() {
  const absl::Status why = Stopping();
  std::map<WorkerKey, Worker> workers;
  std::shared_ptr<WorkerProcess> probe;
  {
    const MutexLock lock(&mutex_);
    shut_down_ = true;
    workers.swap(workers_);
    probe.swap(probe_);
  }
  for (auto& [key, worker] : workers) {
    if (worker.process != nullptr) worker.process->End(why);
    GiveUp(&worker);
  }
  if (probe != nullptr) probe->End(why);
  const MutexLock lock(&mutex_);
  while (callbacks_ > 0) no_callbacks_.Wait(&mutex_);
}

void WorkerSupervisor::GiveUp(Worker* worker) {
  worker->process.reset();
  for (const Waiting& caller : worker->waiting) {
    caller.ready(absl::CancelledError("the job has ended, or the daemon is stopping"));
  }
}

void WorkerSupervisor::Probe(std::function<void(absl::StatusOr<worker::Started>)> found) {
  if (options_.cuda_library == WorkerSupervisorOptions::kNoGpus) {
    KeepFound(NoGpus());
    found(NoGpus());
    return;
  }
  auto process = WorkerProcess::Start(options_.process, [](const absl::Status&) {});
  if (!process.ok()) {
    KeepFound(process.status());
    found(process.status());
    return;
  }
  const std::shared_ptr<WorkerProcess> probe = Share(*std::move(process), [] {});
  {
    const MutexLock lock(&mutex_);
    probe_ = probe;
  }
  probe->Call(StartCall({}), {},
              [weak = weak_from_this(),
               found = std::move(found)](absl::StatusOr<WorkerProcess::Reply> reply) {
                const auto self = weak.lock();
                if (self == nullptr || !self->BeginCallback()) return;
                absl::StatusOr<worker::Started> started = worker::Started();
                if (reply.ok()) {
                  started = reply->message.started();
                } else {
                  started = reply.status();
                }
                self->KeepFound(started);
                found(std::move(started));
                self->DropProbe();
                self->EndCallback();
              });
}

void WorkerSupervisor::DropProbe() {
  std::shared_ptr<WorkerProcess> probe;
  const MutexLock lock(&mutex_);
  probe.swap(probe_);
}

void WorkerSupervisor::KeepFound(const absl::StatusOr<worker::Started>& found) {
  const MutexLock lock(&mutex_);
  found_ = found;
}

absl::StatusOr<worker::Started> WorkerSupervisor::Found() const {
  const MutexLock lock(&mutex_);
  return found_;
}

void WorkerSupervisor::PingLocked(Worker* worker, bool memory, WorkerPort::Answered answered) {
  worker::Call ping;
  ping.mutable_ping()->set_memory(memory);
  worker->process->Call(std::move(ping), {}, std::move(answered));
}

void WorkerSupervisor::AskMemory(absl::Duration patience) {
  struct Answers {
    Mutex mutex;
    CondVar changed;
    std::size_t missing ABSL_GUARDED_BY(mutex) = 0;
  };
  const auto answers = std::make_shared<Answers>();
  {
    const MutexLock lock(&mutex_);
    for (auto& [key, worker] : workers_) {
      if (!worker.open) continue;
      {
        const MutexLock counting(&answers->mutex);
        ++answers->missing;
      }
      PingLocked(&worker, /*memory=*/true, [answers](const auto&) {
        const MutexLock counting(&answers->mutex);
        --answers->missing;
        answers->changed.NotifyAll();
      });
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(patience);
  const MutexLock lock(&answers->mutex);
  while (answers->missing > 0 && answers->changed.WaitUntil(&answers->mutex, deadline)) {
  }
}

std::vector<WorkerStatus> WorkerSupervisor::Workers(absl::Duration patience) {
  if (patience > absl::ZeroDuration()) AskMemory(patience);
  std::vector<WorkerStatus> workers;
  const MutexLock lock(&mutex_);
  for (const auto& [key, worker] : workers_) {
    WorkerStatus status;
    status.key = key;
    status.restarts = worker.restarts;
    status.last_failure = std::string(worker.policy.last_failure().message());
    if (worker.process != nullptr) status.pid = worker.process->pid();
    status.awaits_turn = worker.queued.has_value();
    status.open = worker.open;
    if (worker.open) {
      status.started = worker.started;
      status.memory = worker.process->memory();
    }
    workers.push_back(std::move(status));
  }
  return workers;
}

}  // namespace gradsync::daemon
