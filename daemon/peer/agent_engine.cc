#include "daemon/peer/agent_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/peer/node_name.h"
#include "daemon/peer/peer_address.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/peer/peer_status.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {
namespace {

// If a number is out of bounds, the engine refuses it, and the coordinator receives that error.
EngineSettings SettingsOf(const v1::ConnectEngine& connect) {
  constexpr std::uint64_t kMaxNumber = std::uint64_t{1} << 30;
  EngineSettings settings;
  settings.lanes = static_cast<int>(std::min<std::uint64_t>(connect.lanes(), kMaxNumber));
  settings.chunk_bytes = connect.chunk_bytes();
  settings.wire = static_cast<WireType>(
      std::min(static_cast<std::uint32_t>(connect.wire_type()), std::uint32_t{UINT8_MAX}));
  settings.silence_limit = absl::Milliseconds(
      static_cast<std::int64_t>(std::min<std::uint64_t>(connect.silence_limit_ms(), kMaxNumber)));
  return settings;
}

// What a launch takes here until it is done: an estimate, a little too high.
std::size_t BytesOf(const v1::Launch& launch) {
  constexpr std::size_t kLaunchBytes = 1024, kRankBytes = 64;
  const auto ranks = static_cast<std::size_t>(launch.incarnations_size());
  return kLaunchBytes + std::min(ranks, kMaxRanksPerNode) * kRankBytes;
}

}  // namespace

absl::Status AgentEngine::CheckConnect(const v1::ConnectEngine& connect) const {
  const auto malformed = [this](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(
        "node ", context_.node_name, ": the coordinator connects an engine ", what...));
  };
  const auto nodes = static_cast<std::uint32_t>(connect.node_names_size());
  if (nodes < kMinEngineNodes || nodes > kMaxEngineNodes) {
    return malformed("of ", nodes, " nodes; ", kMinEngineNodes, " to ", kMaxEngineNodes,
                     " allowed");
  }
  if (connect.node() >= nodes) return malformed("of ", nodes, " nodes to node ", connect.node());
  if (!std::all_of(connect.node_names().begin(), connect.node_names().end(), IsNodeName)) {
    return malformed("with a node's name that is empty, too long or not printable");
  }
  if (connect.address().size() > kMaxHostBytes) return malformed("with too long an address");
  return CheckNew(SettingsOf(connect));
}

absl::Status AgentEngine::CheckNew(const EngineSettings& settings) const {
  const EngineLimits& limits = context_.limits;
  std::string why;
  if (settings.lanes > limits.lanes) {
    why = absl::StrCat("the coordinator asks for ", settings.lanes,
                       " lanes, and engine_lanes allows ", limits.lanes, " here");
  } else if (settings.chunk_bytes > limits.chunk_bytes) {
    why = absl::StrCat("the coordinator asks for chunks of ", settings.chunk_bytes,
                       " bytes, and engine_chunk_bytes allows ", limits.chunk_bytes, " here");
  } else if (engines_.load() >= kMaxEngines) {
    why = absl::StrCat("the coordinator has connected ", kMaxEngines,
                       " engines that have not ended yet, as many as one job may have");
  } else {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                   absl::StrCat("node ", context_.node_name, ": ", why),
                   {{field::kNode, context_.node_name}});
}

void AgentEngine::Connect(const v1::ConnectEngine& connect) {
  End(absl::CancelledError("the nodes connect again"));
  const auto failed = [send = context_.send, number = connect.epoch()](const absl::Status& why) {
    // Launch 0 stands for the engine as a whole.
    v1::AttachRequest message;
    message.mutable_launch_done()->set_epoch(number);
    *message.mutable_launch_done()->mutable_status() = ToProto(why);
    send(std::move(message));
  };
  if (const absl::Status refused = CheckConnect(connect); !refused.ok()) return failed(refused);
  auto epoch = std::make_shared<Epoch>();
  epoch->number = connect.epoch();
  epoch->store = std::make_shared<Rendezvous>(
      [send = context_.send, number = epoch->number](const std::string& key,
                                                     const std::string& value) {
        v1::AttachRequest message;
        message.mutable_rendezvous_set()->set_epoch(number);
        message.mutable_rendezvous_set()->set_key(key);
        message.mutable_rendezvous_set()->set_value(value);
        send(std::move(message));
      },
      [send = context_.send, number = epoch->number](const std::string& key) {
        v1::AttachRequest message;
        message.mutable_rendezvous_get()->set_epoch(number);
        message.mutable_rendezvous_get()->set_key(key);
        send(std::move(message));
      });
  EngineSpec spec;
  spec.user = context_.user;
  spec.node = connect.node();
  spec.node_names.assign(connect.node_names().begin(), connect.node_names().end());
  spec.address = context_.address.empty() ? connect.address() : context_.address;
  spec.settings = SettingsOf(connect);
  epoch->node_names = spec.node_names;
  epoch->settings = spec.settings;
  spec.failed = failed;
  engines_.fetch_add(1);
  epoch->exchange = std::make_unique<NodeExchange>(
      context_.node_name,
      [make = context_.make_engine, spec, store = epoch->store]() mutable {
        spec.store = store.get();
        return make(spec);
      },
      failed);
  const absl::Status failure = epoch->exchange->failure();
  epoch->place = epochs_.fetch_add(1) + 1;
  {
    MutexLock lock(&mutex_);
    epoch_ = std::move(epoch);
  }
  if (!failure.ok()) failed(failure);
}

std::shared_ptr<AgentEngine::Epoch> AgentEngine::Find(std::uint64_t number) const {
  MutexLock lock(&mutex_);
  return epoch_ != nullptr && epoch_->number == number ? epoch_ : nullptr;
}

void AgentEngine::Take(const v1::EngineEnd& end) {
  if (Find(end.epoch()) == nullptr) return;
  const absl::Status why = StatusFromPeer(end.status());
  End(why.ok() ? absl::CancelledError("the coordinator ended the engine") : why);
}

void AgentEngine::Take(const v1::RendezvousValue& value) {
  const std::shared_ptr<Epoch> epoch = Find(value.epoch());
  if (epoch != nullptr) (void)epoch->store->Put(value.key(), value.value());
}

void AgentEngine::End(const absl::Status& why) {
  std::shared_ptr<Epoch> epoch;
  {
    MutexLock lock(&mutex_);
    epoch = std::move(epoch_);
    epoch_ = nullptr;
  }
  if (epoch == nullptr) return;
  epoch->store->Cancel(why);
  epoch->exchange->Abort(why);
  context_.reaper->Run([self = shared_from_this(), epoch = std::move(epoch)] {
    epoch->exchange.reset();
    self->engines_.fetch_sub(1);
  });
}

void AgentEngine::Launch(const v1::Launch& launch) {
  InFlight in_flight{launch.epoch(), launch.sequence(), /*place=*/0, BytesOf(launch)};
  std::shared_ptr<Epoch> epoch;
  absl::Status status;
  {
    MutexLock lock(&mutex_);
    ++in_flight_;
    if (epoch_ == nullptr || epoch_->number != launch.epoch()) {
      status = absl::InternalError("the coordinator launched on an engine that is not here");
    } else if (launch.sequence() != ++epoch_->last_launch) {
      status = absl::InternalError("the coordinator's launches are out of order");
    } else {
      epoch = epoch_;
      status = ChargeLocked(in_flight, epoch.get());
      if (status.ok()) in_flight.place = epoch->place;
    }
  }
  NodeWork work;
  std::vector<std::shared_ptr<SemaphorePage>> semaphores;
  if (status.ok()) status = MakeWork(launch, *epoch, &work, &semaphores);
  if (status.ok()) {
    work.done = [self = shared_from_this(), semaphores = std::move(semaphores), in_flight,
                 bucket = launch.bucket(),
                 step = launch.number()](const absl::Status& done, const GradientStats& stats) {
      for (const auto& page : semaphores) {
        if (done.ok()) page->SignalDone(bucket, step);
      }
      self->Answer(in_flight, done, stats);
    };
    status = epoch->exchange->Submit(std::move(work));
  }
  // Every launch is answered, because the coordinator waits for it.
  if (!status.ok()) Answer(in_flight, status, GradientStats{});
}

absl::Status AgentEngine::ChargeLocked(const InFlight& launch, Epoch* epoch) const {
  const std::size_t bytes = epoch->bytes_in_flight + launch.bytes;
  const absl::Status held = epoch->charge.Hold({context_.memory, context_.user}, bytes);
  if (!held.ok()) return TooMuchInFlight(held);
  epoch->bytes_in_flight = bytes;
  return absl::OkStatus();
}

absl::Status AgentEngine::TooMuchInFlight(const absl::Status& why) const {
  return MakeError(
      why.code(), reason::kQuota,
      absl::StrCat("node ", context_.node_name,
                   " has no memory for the coordinator's launches in flight: ", why.message()),
      {{field::kNode, context_.node_name}});
}

absl::Status AgentEngine::MakeWork(const v1::Launch& launch, const Epoch& epoch, NodeWork* work,
                                   std::vector<std::shared_ptr<SemaphorePage>>* semaphores) const {
  work->dtype = static_cast<DataType>(launch.dtype());
  work->count = launch.count();
  work->op = static_cast<ReduceOp>(launch.op());
  work->scale = launch.scale();
  work->measure = launch.channel() != 0 && !IsOrderFree(work->op, work->dtype);
  work->exact = launch.channel() == 0;
  if (launch.has_root_node()) work->root_node = static_cast<int>(launch.root_node());
  if (launch.has_root_node()
          ? launch.root_node() >= epoch.node_names.size() || launch.count() > context_.staging_bytes
          : ItemSize(work->dtype) == 0 || !v1::ReduceOp_IsValid(launch.op()) ||
                launch.op() == v1::REDUCE_OP_UNSPECIFIED || launch.op() == v1::REDUCE_OP_AVERAGE) {
    return absl::InternalError(
        "the coordinator launched an unknown operation, elements of an unknown type, or too many");
  }
  if (launch.has_root_node() && launch.incarnations().empty()) {
    // The exchange needs memory through which it passes.
    auto charge = MemoryAccount{context_.memory, context_.user}.Reserve(launch.count());
    if (!charge.ok()) return TooMuchInFlight(charge.status());
    work->keep.push_back(std::make_shared<ArenaQuota::Reservation>(*std::move(charge)));
  }
  const auto& incarnations = launch.incarnations();
  if (static_cast<std::size_t>(incarnations.size()) > kMaxRanksPerNode) {
    return absl::InternalError(absl::StrCat("the coordinator launched on ", incarnations.size(),
                                            " ranks of one node; ", kMaxRanksPerNode, " allowed"));
  }
  for (auto it = incarnations.begin(); it != incarnations.end(); ++it) {
    if (std::find(incarnations.begin(), it, *it) == it) continue;
    return absl::InternalError("the coordinator launched on a rank twice");
  }
  for (const std::uint64_t incarnation : incarnations) {
    const std::shared_ptr<ForwardingJob> rank = context_.find_rank(incarnation);
    if (rank == nullptr) {
      return absl::InternalError("the coordinator launched on a rank that is not here");
    }
    auto memory = rank->layouts().MemoryOf(launch);
    if (!memory.ok()) return memory.status();
    work->buffers.push_back(memory->data);
    work->keep.push_back(std::move(memory->keep));
    if (memory->semaphores != nullptr) semaphores->push_back(std::move(memory->semaphores));
  }
  return absl::OkStatus();
}

void AgentEngine::Answer(const InFlight& launch, const absl::Status& status,
                         const GradientStats& stats) {
  v1::AttachRequest message;
  v1::LaunchDone* const done = message.mutable_launch_done();
  done->set_epoch(launch.epoch);
  done->set_sequence(launch.sequence);
  if (!status.ok()) *done->mutable_status() = ToProto(status);
  done->set_sum_of_squares(stats.sum_of_squares);
  done->set_non_finite(stats.non_finite);
  context_.send(std::move(message));
  {
    MutexLock lock(&mutex_);
    --in_flight_;
    const bool charged = epoch_ != nullptr && epoch_->place == launch.place;
    if (charged) epoch_->bytes_in_flight -= launch.bytes;
  }
  context_.settled();
}

bool AgentEngine::busy() const {
  MutexLock lock(&mutex_);
  return in_flight_ > 0;
}

std::optional<EngineSnapshot> AgentEngine::Snapshot() const {
  MutexLock lock(&mutex_);
  if (epoch_ == nullptr) return std::nullopt;
  return EngineSnapshot{epoch_->number, epoch_->node_names, epoch_->settings, context_.encrypted,
                        epoch_->exchange->Statistics()};
}

}  // namespace gradsync::daemon
