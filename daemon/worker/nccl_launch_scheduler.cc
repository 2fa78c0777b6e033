#include "daemon/worker/nccl_launch_scheduler.h"

#include <algorithm>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/reduce/gpu_staging.h"
#include "daemon/worker/gpu_arena.h"
#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {
namespace {

// How long all workers may take to connect. On a large cluster that takes minutes.
constexpr std::uint64_t kConnectLimitNs = 300'000'000'000;
// How many given-up steps are remembered. That of the oldest layout is forgotten first.
constexpr std::size_t kMaxGivenUp = 1024;

const std::shared_ptr<WorkerPort>& WorkerOf(const DeviceArena* arena) {
  return GpuArena::Of(*arena).worker();
}

// Whether all ranks of the operation are on one GPU. Any other GPU of the job, which then comes
// from an earlier generation, adds only zeros.
bool IsOfOneGpu(const ReduceOperation& operation) {
  const auto& arenas = operation.device().arenas;
  return std::all_of(arenas.begin(), arenas.end(), [&](const DeviceArena* arena) {
    return WorkerOf(arena) == WorkerOf(arenas.front());
  });
}

absl::Status WorkerHasEnded() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                   "the worker of one of the job's GPUs has ended");
}

// The call has no arenas if none of the operation's arenas is in `worker`.
worker::Call AwaitReadyOf(const ReduceOperation& operation, const WorkerPort* worker) {
  worker::Call call;
  worker::AwaitReady* const await = call.mutable_await_ready();
  await->set_layout(operation.device().layout);
  await->set_step(operation.number);
  await->set_bucket(operation.bucket);
  for (const DeviceArena* arena : operation.device().arenas) {
    if (WorkerOf(arena).get() == worker) await->add_arenas(GpuArena::Of(*arena).number());
  }
  return call;
}

worker::Call LaunchOf(const ReduceOperation& operation, DataType staging,
                      const WorkerPort* worker) {
  worker::Call call;
  worker::Launch* const launch = call.mutable_launch();
  launch->set_layout(operation.device().layout);
  launch->set_step(operation.number);
  launch->set_bucket(operation.bucket);
  launch->set_data_type(static_cast<std::uint32_t>(operation.dtype));
  launch->set_staging_data_type(static_cast<std::uint32_t>(staging));
  launch->set_offset(operation.device().offset);
  launch->set_count(operation.count);
  launch->set_scale(operation.scale);
  for (const DeviceArena* arena : operation.device().arenas) {
    if (WorkerOf(arena).get() == worker) launch->add_arenas(GpuArena::Of(*arena).number());
  }
  launch->set_measure(operation.measure);
  launch->set_step_buckets(operation.device().step_buckets);
  launch->set_verdict_offset(operation.device().verdict_offset);
  return call;
}

}  // namespace

void NcclLaunchScheduler::Launch(ReduceOperation* operation) {
  {
    MutexLock lock(&mutex_);
    const auto given_up = given_up_.find(operation->device().layout);
    if (given_up != given_up_.end() && given_up->second == operation->number) {
      SkipLocked(operation, absl::OkStatus());
    } else {
      if (given_up != given_up_.end()) given_up_.erase(given_up);
      EnrollLocked(*operation);
      pending_.push_back(std::make_shared<Pending>(Pending{operation}));
    }
  }
  Pump();
}

void NcclLaunchScheduler::GiveUp(const GivenUpStep& step) {
  {
    MutexLock lock(&mutex_);
    // A limit is needed because the numbers of ended layouts never return.
    if (given_up_.size() >= kMaxGivenUp) given_up_.erase(given_up_.begin());
    given_up_[step.layout] = step.step;
    for (auto it = pending_.begin(); it != pending_.end();) {
      ReduceOperation* const operation = (*it)->operation;
      if (operation->device().layout != step.layout || operation->number != step.step) {
        ++it;
        continue;
      }
      SkipLocked(operation, absl::OkStatus());
      it = pending_.erase(it);
    }
    for (const auto& member : members_) {
      auto worker = member.lock();
      if (worker == nullptr) continue;
      worker::Call call;
      call.mutable_give_up_step()->set_layout(step.layout);
      call.mutable_give_up_step()->set_step(step.step);
      calls_.push_back({std::move(worker), std::move(call), [](const auto&) {}});
    }
  }
  Pump();
}

bool NcclLaunchScheduler::HasEnded() const {
  MutexLock lock(&mutex_);
  return pending_.empty() && ledger_.empty() &&
         std::all_of(members_.begin(), members_.end(),
                     [](const auto& member) { return member.expired(); });
}

std::optional<CollectiveGate> NcclLaunchScheduler::gate() const {
  MutexLock lock(&mutex_);
  if (!joined_ || !connected_) return std::nullopt;
  return GatedLocked() ? CollectiveGate::kAllNodes : CollectiveGate::kNone;
}

void NcclLaunchScheduler::EnrollLocked(const ReduceOperation& operation) {
  std::vector<std::weak_ptr<WorkerPort>> members;
  bool changed = false;
  for (const auto& member : members_) {
    const auto worker = member.lock();
    if (worker != nullptr && !worker->HasEnded()) {
      members.push_back(member);
    } else {
      changed = true;
    }
  }
  for (const DeviceArena* arena : operation.device().arenas) {
    const bool known = std::any_of(members.begin(), members.end(), [&](const auto& member) {
      return member.lock() == WorkerOf(arena);
    });
    if (known) continue;
    members.push_back(WorkerOf(arena));
    changed = true;
  }
  // A new generation of the job may have other settings. The wire type belongs to each launch.
  const NcclSettings& nccl = operation.device().nccl;
  const bool reconnect =
      connected_ && (nccl.max_ctas != nccl_.max_ctas || nccl.algorithm != nccl_.algorithm ||
                     nccl.protocol != nccl_.protocol);
  nccl_ = nccl;
  if (!changed && !reconnect) return;
  members_ = std::move(members);
  joined_ = members_.size() == 1 && !connected_;
  // An attempt to connect that is under way is of no use now.
  ++round_;
  connecting_ = 0;
}

void NcclLaunchScheduler::ConnectLocked() {
  ++round_;
  const bool disconnect = std::exchange(connected_, false);
  time_sliced_ = false;
  const std::weak_ptr<NcclLaunchScheduler> weak = weak_from_this();
  if (disconnect) {
    for (const auto& member : members_) {
      auto worker = member.lock();
      if (worker == nullptr) continue;
      worker::Call call;
      call.mutable_disconnect();
      // A new worker ignores it.
      calls_.push_back({std::move(worker), std::move(call), [](const auto&) {}});
    }
  }
  if (members_.size() == 1) {
    joined_ = true;
    return;
  }
  auto first = members_.front().lock();
  if (first == nullptr) return FailPendingLocked(WorkerHasEnded());
  connecting_ = 1;
  worker::Call call;
  call.mutable_new_nccl_id();
  calls_.push_back({std::move(first), std::move(call), [weak, round = round_](const auto& reply) {
                      if (const auto self = weak.lock()) self->OnId(round, reply);
                    }});
}

void NcclLaunchScheduler::OnId(std::uint64_t round,
                               const absl::StatusOr<WorkerPort::Reply>& reply) {
  if (!reply.ok()) return OnConnected(round, reply);
  {
    MutexLock lock(&mutex_);
    if (round != round_) return;
    connecting_ = members_.size();
    connected_ = true;
    const std::weak_ptr<NcclLaunchScheduler> weak = weak_from_this();
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
      auto worker = members_[rank].lock();
      const auto answered = [weak, round](const absl::StatusOr<WorkerPort::Reply>& connected) {
        if (const auto self = weak.lock()) self->OnConnected(round, connected);
      };
      if (worker == nullptr) {
        FailPendingLocked(WorkerHasEnded());
        break;
      }
      worker::Call call;
      worker::Connect* const connect = call.mutable_connect();
      connect->set_unique_id(reply->message.nccl_id().unique_id());
      connect->set_rank(static_cast<std::uint32_t>(rank));
      connect->set_ranks(static_cast<std::uint32_t>(members_.size()));
      connect->set_limit_ns(kConnectLimitNs);
      connect->set_max_ctas(nccl_.max_ctas);
      connect->set_algorithm(NcclName(nccl_.algorithm));
      connect->set_protocol(NcclName(nccl_.protocol));
      calls_.push_back({std::move(worker), std::move(call), answered});
    }
  }
  Pump();
}

void NcclLaunchScheduler::OnConnected(std::uint64_t round,
                                      const absl::StatusOr<WorkerPort::Reply>& reply) {
  {
    MutexLock lock(&mutex_);
    if (round != round_ || connecting_ == 0) return;
    if (!reply.ok()) {
      FailPendingLocked(reply.status());
    } else {
      time_sliced_ = time_sliced_ || !reply->message.connected().mps();
      if (--connecting_ == 0) joined_ = true;
    }
  }
  Pump();
}

// The next operation tries to connect again.
void NcclLaunchScheduler::FailPendingLocked(const absl::Status& why) {
  ++round_;
  connecting_ = 0;
  for (const auto& pending : std::exchange(pending_, {})) SkipLocked(pending->operation, why);
}

void NcclLaunchScheduler::SkipLocked(ReduceOperation* operation, const absl::Status& failure) {
  LaunchRecord skipped;
  skipped.operation = operation;
  skipped.is_void = true;
  skipped.failure = failure;
  finished_.push_back(std::move(skipped));
}

bool NcclLaunchScheduler::GatedLocked() const {
  return connected_ &&
         (gate_ == CollectiveGate::kAllNodes || (gate_ == CollectiveGate::kAuto && time_sliced_));
}

void NcclLaunchScheduler::AskLocked(const std::shared_ptr<Pending>& pending) {
  if (std::exchange(pending->asked, true)) return;
  for (const auto& member : members_) {
    auto worker = member.lock();
    worker::Call call = AwaitReadyOf(*pending->operation, worker.get());
    if (call.await_ready().arenas().empty()) continue;
    ++pending->left;
    calls_.push_back({std::move(worker), std::move(call),
                      [weak = weak_from_this(), asked = std::weak_ptr<Pending>(pending)](
                          const absl::StatusOr<WorkerPort::Reply>& reply) {
                        if (const auto self = weak.lock()) self->OnReady(asked, reply.status());
                      }});
  }
}

void NcclLaunchScheduler::OnReady(const std::weak_ptr<Pending>& asked, const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    const std::shared_ptr<Pending> pending = asked.lock();
    if (pending == nullptr) return;  // given up
    --pending->left;
    if (!status.ok()) {
      // The bucket is launched nowhere, so no GPU waits for the lost one.
      pending_.erase(std::find(pending_.begin(), pending_.end(), pending));
      SkipLocked(pending->operation, status);
    }
  }
  Pump();
}

void NcclLaunchScheduler::LaunchLocked(ReduceOperation* operation) {
  // A worker may have ended while the others were connecting. Then the bucket is launched nowhere:
  // no GPU waits for that worker, and none reports the step as complete.
  absl::Status ended;
  std::vector<std::shared_ptr<WorkerPort>> workers;  // their owners may let them go meanwhile
  for (const auto& member : members_) {
    workers.push_back(member.lock());
    ended.Update(workers.back() == nullptr ? WorkerHasEnded() : workers.back()->EndReason());
  }
  for (const DeviceArena* arena : operation->device().arenas) {
    if (std::find(workers.begin(), workers.end(), WorkerOf(arena)) == workers.end()) {
      ended.Update(WorkerHasEnded());
    }
  }
  if (!ended.ok()) return SkipLocked(operation, ended);
  LaunchRecord launch;
  launch.operation = operation;
  launch.times.start_ns = MonotonicNowNs();
  std::vector<LaunchLedger::Participant> participants;
  for (const auto& worker : workers) participants.push_back(worker.get());
  const std::uint64_t number = ledger_.Begin(std::move(launch), participants);
  const DataType staging =
      StagingType(operation->dtype, IsOfOneGpu(*operation) ? NcclWireType::kAuto
                                                           : operation->device().nccl.wire_type);
  const auto connected = std::make_shared<const std::vector<std::weak_ptr<WorkerPort>>>(
      connected_ ? members_ : decltype(members_)());
  for (auto& worker : workers) {
    // Holds the worker, which so is not idle while it owes the answer.
    auto answered = [self = shared_from_this(), number, worker,
                     connected](const absl::StatusOr<WorkerPort::Reply>& reply) {
      self->OnLaunched(number, worker.get(), *connected, reply);
    };
    worker::Call call = LaunchOf(*operation, staging, worker.get());
    calls_.push_back({std::move(worker), std::move(call), std::move(answered)});
  }
}

void NcclLaunchScheduler::OnLaunched(std::uint64_t launch, const WorkerPort* worker,
                                     const std::vector<std::weak_ptr<WorkerPort>>& connected,
                                     const absl::StatusOr<WorkerPort::Reply>& reply) {
  LaunchAnswer answer;
  answer.status = reply.status();
  if (reply.ok()) {
    const worker::LaunchDone& done = reply->message.launch_done();
    answer.stats = GradientStats{done.sum_of_squares(), done.non_finite()};
    answer.is_void = done.void_step();
    answer.times = {done.ready_ns(), done.finish_ns()};
  }
  {
    MutexLock lock(&mutex_);
    if (!reply.ok()) {
      // The other workers may wait for this one in their all-reduce, and their communicator is
      // broken. The members may have changed since: a killed worker answers when it has ended.
      for (const auto& member : connected) {
        auto other = member.lock();
        if (other != nullptr) kills_.push_back({std::move(other), reply.status()});
      }
    }
    auto finished = ledger_.Answer(worker, launch, answer);
    if (finished.has_value()) finished_.push_back(*std::move(finished));
  }
  Pump();
}

void NcclLaunchScheduler::AdvanceLocked() {
  if (pending_.empty() || connecting_ > 0) return;
  if (!joined_) {
    if (ledger_.empty()) ConnectLocked();
    if (!joined_) return;
  }
  if (GatedLocked()) {
    for (const auto& pending : pending_) AskLocked(pending);
  }
  while (!pending_.empty() && pending_.front()->left == 0) {
    LaunchLocked(pending_.front()->operation);
    pending_.pop_front();
  }
}

void NcclLaunchScheduler::Pump() {
  const auto self = shared_from_this();
  std::vector<Call> calls;
  std::vector<LaunchRecord> finished;
  std::vector<Kill> kills;
  bool mine = false;
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (pumping_ && !mine) return;
      AdvanceLocked();
      calls = std::exchange(calls_, {});
      finished = std::exchange(finished_, {});
      kills = std::exchange(kills_, {});
      mine = pumping_ = !calls.empty() || !finished.empty() || !kills.empty();
      if (!mine) return;
    }
    for (const Kill& kill : kills) kill.worker->Kill(kill.why);
    for (Call& call : calls) {
      if (call.worker == nullptr) {
        call.answered(WorkerHasEnded());
      } else {
        call.worker->Call(std::move(call.message), {}, std::move(call.answered));
      }
    }
    for (const LaunchRecord& launch : finished) Finish(launch);
  }
}

}  // namespace gradsync::daemon
