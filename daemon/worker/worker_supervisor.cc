#include "daemon/worker/worker_supervisor.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace gradsync {

WorkerSupervisor::WorkerSupervisor(WorkerSupervisorOptions options, const Clock* clock,
                                   Executor* executor)
    : options_(std::move(options)), clock_(clock), executor_(executor) {}

// Their threads call this object until they are joined: it waits for all of them.
WorkerSupervisor::~WorkerSupervisor() {
  std::map<WorkerKey, Worker> workers;
  {
    const MutexLock lock(&mutex_);
    workers.swap(workers_);
    probe_.reset();
  }
  for (auto& [key, worker] : workers) GiveUp(&worker);
  const MutexLock lock(&mutex_);
  while (processes_ > 0) ended_.Wait(&mutex_);
}

void WorkerSupervisor::Ensure(const WorkerKey& key, const Ready& ready, const Lost& lost) {
  std::shared_ptr<WorkerProcess> started;
  std::uint64_t incarnation = 0;
  absl::StatusOr<std::shared_ptr<WorkerProcess>> at_once = nullptr;
  {
    const MutexLock lock(&mutex_);
    Worker& worker = workers_[key];
    if (worker.process == nullptr) {
      if (const absl::Status status = StartLocked(key, &worker); !status.ok()) at_once = status;
      started = worker.process;
      incarnation = worker.incarnation;
    }
    if (worker.open) {
      worker.holders.push_back(lost);
      at_once = worker.process;
    } else if (worker.process != nullptr) {
      worker.waiting.emplace_back(ready, lost);
    }
  }
  if (started != nullptr) {
    // Not under the lock: a process that has ended already replies from within.
    started->Call(StartCall(key.device), {},
                  [this, key, incarnation](absl::StatusOr<WorkerProcess::Reply> reply) {
                    OnStarted(key, incarnation, std::move(reply));
                  });
    return;
  }
  if (!at_once.ok() || *at_once != nullptr) ready(std::move(at_once));
}

absl::Status WorkerSupervisor::StartLocked(const WorkerKey& key, Worker* worker) {
  const std::uint64_t now_ns = clock_->NowNs();
  if (const absl::Status status = worker->policy.MayStart(now_ns); !status.ok()) return status;
  WorkerProcessOptions options = options_.process;
  // The driver enumerates one MIG instance for a process, the one that is named here.
  if (absl::StartsWith(key.device, "MIG-")) {
    options.environment.push_back(absl::StrCat("CUDA_VISIBLE_DEVICES=", key.device));
  }
  const std::uint64_t incarnation = ++last_incarnation_;
  auto process = WorkerProcess::Start(
      std::move(options),
      [this, key, incarnation](const absl::Status& why) { OnEnded(key, incarnation, why); });
  if (!process.ok()) {
    worker->policy.Failed(now_ns, process.status());
    return process.status();
  }
  worker->process = OwnLocked(*std::move(process));
  worker->incarnation = incarnation;
  return absl::OkStatus();
}

worker::Call WorkerSupervisor::StartCall(const std::string& device) const {
  worker::Call call;
  worker::Start* const start = call.mutable_start();
  start->set_cuda_library(options_.cuda_library);
  start->set_nccl_library(options_.nccl_library);
  start->set_device(device);
  start->set_operation_limit_ns(
      static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options_.operation_limit)));
  return call;
}

void WorkerSupervisor::OnStarted(const WorkerKey& key, std::uint64_t incarnation,
                                 absl::StatusOr<WorkerProcess::Reply> reply) {
  std::vector<std::pair<Ready, Lost>> waiting;
  absl::StatusOr<std::shared_ptr<WorkerProcess>> result = nullptr;
  {
    const MutexLock lock(&mutex_);
    Worker* const worker = FindLocked(key, incarnation);
    if (worker == nullptr) return;
    waiting.swap(worker->waiting);
    if (reply.ok()) {
      worker->open = true;
      worker->started = reply->message.started();
      worker->policy.Started(clock_->NowNs());
      for (auto& [ready, lost] : waiting) worker->holders.push_back(std::move(lost));
      result = worker->process;
    } else {
      // A GPU that is not there may be there at the next try: no process is kept for it.
      worker->policy.Failed(clock_->NowNs(), reply.status());
      result = reply.status();
      worker->process.reset();
    }
  }
  for (auto& [ready, lost] : waiting) ready(result);
}

void WorkerSupervisor::OnEnded(const WorkerKey& key, std::uint64_t incarnation,
                               const absl::Status& why) {
  std::vector<Lost> holders;
  {
    const MutexLock lock(&mutex_);
    Worker* const worker = FindLocked(key, incarnation);
    if (worker == nullptr || worker->process == nullptr) return;
    worker->policy.Failed(clock_->NowNs(), why);
    worker->open = false;
    holders.swap(worker->holders);
    worker->process.reset();
  }
  for (const Lost& lost : holders) lost(why);
}

WorkerSupervisor::Worker* WorkerSupervisor::FindLocked(const WorkerKey& key,
                                                       std::uint64_t incarnation) {
  const auto found = workers_.find(key);
  if (found == workers_.end() || found->second.incarnation != incarnation) return nullptr;
  return &found->second;
}

std::shared_ptr<WorkerProcess> WorkerSupervisor::OwnLocked(std::unique_ptr<WorkerProcess> process) {
  ++processes_;
  return {process.release(), [this](WorkerProcess* last) {
            executor_->Run([this, last] {
              delete last;
              const MutexLock lock(&mutex_);
              --processes_;
              ended_.NotifyAll();
            });
          }};
}

void WorkerSupervisor::LetGo(const WorkerKey& key) {
  Worker worker;
  {
    const MutexLock lock(&mutex_);
    const auto found = workers_.find(key);
    if (found == workers_.end()) return;
    worker = std::move(found->second);
    workers_.erase(found);
  }
  GiveUp(&worker);
}

void WorkerSupervisor::GiveUp(Worker* worker) {
  worker->process.reset();
  for (auto& [ready, lost] : worker->waiting) {
    ready(absl::CancelledError("the job has ended, or the daemon is stopping"));
  }
}

void WorkerSupervisor::Probe(std::function<void(absl::StatusOr<worker::Started>)> found) {
  auto process = WorkerProcess::Start(options_.process, [](const absl::Status&) {});
  if (!process.ok()) {
    found(process.status());
    return;
  }
  std::shared_ptr<WorkerProcess> probe;
  {
    const MutexLock lock(&mutex_);
    probe = OwnLocked(*std::move(process));
    probe_ = probe;
  }
  probe->Call(StartCall(""), {},
              [this, found = std::move(found)](absl::StatusOr<WorkerProcess::Reply> reply) {
                {
                  const MutexLock lock(&mutex_);
                  probe_.reset();
                }
                if (!reply.ok()) {
                  found(reply.status());
                } else {
                  found(reply->message.started());
                }
              });
}

std::vector<WorkerStatus> WorkerSupervisor::Workers() const {
  std::vector<WorkerStatus> workers;
  const MutexLock lock(&mutex_);
  for (const auto& [key, worker] : workers_) {
    WorkerStatus status;
    status.key = key;
    status.failures = worker.policy.failures();
    status.last_failure = std::string(worker.policy.last_failure().message());
    if (worker.process != nullptr && worker.open) {
      status.pid = worker.process->pid();
      status.started = worker.started;
      status.memory = worker.process->memory();
    }
    workers.push_back(std::move(status));
  }
  return workers;
}

}  // namespace gradsync
