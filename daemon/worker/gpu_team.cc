#include "daemon/worker/gpu_team.h"

#include <algorithm>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/reduce/gpu_staging.h"
#include "daemon/worker/gpu_arena.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {
namespace {

// For all workers to be there; making a communicator takes minutes on a large cluster.
constexpr std::uint64_t kConnectLimitNs = 300'000'000'000;
// Steps that are remembered as given up; the oldest layout's goes first.
constexpr std::size_t kMaxGivenUp = 1024;

// Nothing but zeros then travels from the job's other GPUs, which an earlier life of it was on.
bool IsOfOneGpu(const ReduceOperation& operation) {
  const auto& arenas = operation.gpu.arenas;
  return std::all_of(arenas.begin(), arenas.end(), [&](const GpuArena* arena) {
    return arena->worker() == arenas.front()->worker();
  });
}

// Has no arenas if none of the operation's lies with `worker`.
worker::Call AwaitReadyOf(const ReduceOperation& operation, const WorkerPort* worker) {
  worker::Call call;
  worker::AwaitReady* const await = call.mutable_await_ready();
  await->set_layout(operation.gpu.layout);
  await->set_step(operation.number);
  await->set_bucket(operation.bucket);
  for (const GpuArena* arena : operation.gpu.arenas) {
    if (arena->worker().get() == worker) await->add_arenas(arena->number());
  }
  return call;
}

worker::Call LaunchOf(const ReduceOperation& operation, DataType staging,
                      const WorkerPort* worker) {
  worker::Call call;
  worker::Launch* const launch = call.mutable_launch();
  launch->set_layout(operation.gpu.layout);
  launch->set_step(operation.number);
  launch->set_bucket(operation.bucket);
  launch->set_data_type(static_cast<std::uint32_t>(operation.dtype));
  launch->set_staging_data_type(static_cast<std::uint32_t>(staging));
  launch->set_offset(operation.gpu.offset);
  launch->set_count(operation.count);
  launch->set_scale(operation.scale);
  for (const GpuArena* arena : operation.gpu.arenas) {
    if (arena->worker().get() == worker) launch->add_arenas(arena->number());
  }
  launch->set_measure(operation.measure);
  launch->set_step_buckets(operation.gpu.step_buckets);
  launch->set_verdict_offset(operation.gpu.verdict_offset);
  return call;
}

}  // namespace

void GpuTeam::Launch(ReduceOperation* operation) {
  {
    MutexLock lock(&mutex_);
    const auto given_up = given_up_.find(operation->gpu.layout);
    if (given_up != given_up_.end() && given_up->second == operation->number) {
      AnswerLocked(operation, absl::OkStatus());
    } else {
      if (given_up != given_up_.end()) given_up_.erase(given_up);
      EnrollLocked(*operation);
      pending_.push_back(std::make_shared<Pending>(Pending{operation}));
    }
  }
  Pump();
}

void GpuTeam::GiveUp(const GivenUpStep& step) {
  {
    MutexLock lock(&mutex_);
    // Layouts' numbers are never used again: those of ended jobs would gather.
    if (given_up_.size() >= kMaxGivenUp) given_up_.erase(given_up_.begin());
    given_up_[step.layout] = step.step;
    for (auto it = pending_.begin(); it != pending_.end();) {
      ReduceOperation* const operation = (*it)->operation;
      if (operation->gpu.layout != step.layout || operation->number != step.step) {
        ++it;
        continue;
      }
      AnswerLocked(operation, absl::OkStatus());
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

bool GpuTeam::Over() const {
  MutexLock lock(&mutex_);
  return pending_.empty() && in_flight_ == 0 &&
         std::all_of(members_.begin(), members_.end(),
                     [](const auto& member) { return member.expired(); });
}

std::optional<CollectiveGate> GpuTeam::gate() const {
  MutexLock lock(&mutex_);
  if (!joined_ || !connected_) return std::nullopt;
  return GatedLocked() ? CollectiveGate::kAllNodes : CollectiveGate::kNone;
}

void GpuTeam::EnrollLocked(const ReduceOperation& operation) {
  std::vector<std::weak_ptr<WorkerPort>> members;
  bool changed = false;
  for (const auto& member : members_) {
    const auto worker = member.lock();
    if (worker != nullptr && !worker->over()) {
      members.push_back(member);
    } else {
      changed = true;
    }
  }
  for (const GpuArena* arena : operation.gpu.arenas) {
    const bool known = std::any_of(members.begin(), members.end(), [&](const auto& member) {
      return member.lock() == arena->worker();
    });
    if (known) continue;
    members.push_back(arena->worker());
    changed = true;
  }
  // Of a generation of the job that has chosen otherwise. The wire type is each launch's own.
  const NcclSettings& nccl = operation.gpu.nccl;
  const bool reconnect =
      connected_ && (nccl.max_ctas != nccl_.max_ctas || nccl.algorithm != nccl_.algorithm ||
                     nccl.protocol != nccl_.protocol);
  nccl_ = nccl;
  if (!changed && !reconnect) return;
  members_ = std::move(members);
  joined_ = members_.size() == 1 && !connected_;
  // Whoever is connecting does it in vain.
  ++round_;
  connecting_ = 0;
}

void GpuTeam::ConnectLocked() {
  ++round_;
  const bool disconnect = std::exchange(connected_, false);
  time_sliced_ = false;
  const std::weak_ptr<GpuTeam> weak = weak_from_this();
  if (disconnect) {
    for (const auto& member : members_) {
      auto worker = member.lock();
      if (worker == nullptr) continue;
      worker::Call call;
      call.mutable_disconnect();
      // One that has just come has nothing to disconnect.
      calls_.push_back({std::move(worker), std::move(call), [](const auto&) {}});
    }
  }
  if (members_.size() == 1) {
    joined_ = true;
    return;
  }
  auto first = members_.front().lock();
  if (first == nullptr) return FailPendingLocked(absl::UnavailableError("a worker has gone"));
  connecting_ = 1;
  worker::Call call;
  call.mutable_new_nccl_id();
  calls_.push_back({std::move(first), std::move(call), [weak, round = round_](const auto& reply) {
                      if (const auto self = weak.lock()) self->OnId(round, reply);
                    }});
}

void GpuTeam::OnId(std::uint64_t round, const absl::StatusOr<WorkerPort::Reply>& reply) {
  if (!reply.ok()) return OnConnected(round, reply);
  {
    MutexLock lock(&mutex_);
    if (round != round_) return;
    connecting_ = members_.size();
    connected_ = true;
    const std::weak_ptr<GpuTeam> weak = weak_from_this();
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
      auto worker = members_[rank].lock();
      const auto answered = [weak, round](const absl::StatusOr<WorkerPort::Reply>& connected) {
        if (const auto self = weak.lock()) self->OnConnected(round, connected);
      };
      if (worker == nullptr) {
        FailPendingLocked(absl::UnavailableError("a worker has gone"));
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

void GpuTeam::OnConnected(std::uint64_t round, const absl::StatusOr<WorkerPort::Reply>& reply) {
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

// The next operation tries again.
void GpuTeam::FailPendingLocked(const absl::Status& why) {
  ++round_;
  connecting_ = 0;
  for (const auto& pending : std::exchange(pending_, {})) AnswerLocked(pending->operation, why);
}

void GpuTeam::AnswerLocked(ReduceOperation* operation, const absl::Status& failure) {
  auto flight = std::make_shared<Flight>();
  flight->operation = operation;
  flight->is_void = true;
  flight->failure = failure;
  finished_.push_back(std::move(flight));
}

bool GpuTeam::GatedLocked() const {
  return connected_ &&
         (gate_ == CollectiveGate::kAllNodes || (gate_ == CollectiveGate::kAuto && time_sliced_));
}

void GpuTeam::AskLocked(const std::shared_ptr<Pending>& pending) {
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

void GpuTeam::OnReady(const std::weak_ptr<Pending>& asked, const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    const std::shared_ptr<Pending> pending = asked.lock();
    if (pending == nullptr) return;  // given up
    --pending->left;
    if (!status.ok()) {
      // It is launched nowhere, so no GPU waits for the one that is lost.
      pending_.erase(std::find(pending_.begin(), pending_.end(), pending));
      AnswerLocked(pending->operation, status);
    }
  }
  Pump();
}

void GpuTeam::LaunchLocked(ReduceOperation* operation) {
  // One may have gone while this waited for the others to connect. Then it is launched nowhere: no
  // GPU waits for that one, and none says that the step is complete.
  bool whole = std::all_of(members_.begin(), members_.end(), [](const auto& member) {
    const auto worker = member.lock();
    return worker != nullptr && !worker->over();
  });
  for (const GpuArena* arena : operation->gpu.arenas) {
    whole = whole && std::any_of(members_.begin(), members_.end(), [&](const auto& member) {
              return member.lock() == arena->worker();
            });
  }
  if (!whole) {
    return AnswerLocked(operation,
                        absl::UnavailableError("the worker of one of its GPUs has gone"));
  }
  auto flight = std::make_shared<Flight>();
  flight->operation = operation;
  flight->times.start_ns = MonotonicNowNs();
  flight->left = members_.size();
  ++in_flight_;
  const DataType staging =
      StagingType(operation->dtype,
                  IsOfOneGpu(*operation) ? NcclWireType::kAuto : operation->gpu.nccl.wire_type);
  for (const auto& member : members_) {
    auto worker = member.lock();
    // With the worker: it is not idle as long as it owes this.
    auto answered = [self = shared_from_this(), flight,
                     worker](const absl::StatusOr<WorkerPort::Reply>& reply) {
      self->OnLaunched(flight, reply);
    };
    worker::Call call = LaunchOf(*operation, staging, worker.get());
    calls_.push_back({std::move(worker), std::move(call), std::move(answered)});
  }
}

void GpuTeam::OnLaunched(const std::shared_ptr<Flight>& flight,
                         const absl::StatusOr<WorkerPort::Reply>& reply) {
  {
    MutexLock lock(&mutex_);
    if (!reply.ok()) {
      if (flight->failure.ok()) flight->failure = reply.status();
      // The others may wait for it in their all-reduce, and their communicator is broken.
      for (const auto& member : members_) {
        auto worker = connected_ ? member.lock() : nullptr;
        if (worker != nullptr) kills_.push_back({std::move(worker), reply.status()});
      }
    } else {
      const worker::LaunchDone& done = reply->message.launch_done();
      flight->is_void = flight->is_void || done.void_step();
      flight->times.start_ns = std::max(flight->times.start_ns, done.ready_ns());
      flight->times.finish_ns = std::max(flight->times.finish_ns, done.finish_ns());
      flight->result = done;
    }
    if (--flight->left == 0) {
      --in_flight_;
      finished_.push_back(flight);
    }
  }
  Pump();
}

void GpuTeam::AdvanceLocked() {
  if (pending_.empty() || connecting_ > 0) return;
  if (!joined_) {
    if (in_flight_ == 0) ConnectLocked();
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

void GpuTeam::Pump() {
  const auto self = shared_from_this();
  std::vector<Call> calls;
  std::vector<std::shared_ptr<Flight>> finished;
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
        call.answered(absl::UnavailableError("a worker has gone"));
      } else {
        call.worker->Call(std::move(call.message), {}, std::move(call.answered));
      }
    }
    for (const std::shared_ptr<Flight>& flight : finished) {
      ReduceOperation* const operation = flight->operation;
      operation->failure = flight->failure;
      operation->numbers = {flight->result.sum_of_squares(), flight->result.non_finite()};
      operation->gpu.is_void = flight->is_void;
      operation->done(flight->times);
    }
  }
}

}  // namespace gradsync
