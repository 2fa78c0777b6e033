#include "daemon/peer/engine_epoch.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/engine/local_address.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {
namespace {

const HostBuffers& BuffersOf(const ReduceOperation& operation) {
  const auto* const broadcast = std::get_if<NodeBroadcast>(&operation.work);
  return broadcast != nullptr ? broadcast->buffers
                              : std::get<NodeReduction>(operation.work).buffers;
}

bool IsRoot(const ReduceOperation& operation, std::uint32_t rank) {
  const auto* const broadcast = std::get_if<NodeBroadcast>(&operation.work);
  return broadcast != nullptr && broadcast->root == rank;
}

v1::Launch MessageOf(const ReduceOperation& operation) {
  v1::Launch launch;
  launch.set_dtype(static_cast<v1::DataType>(operation.dtype));
  launch.set_count(operation.count);
  launch.set_op(static_cast<v1::ReduceOp>(operation.op));
  launch.set_scale(operation.scale);
  launch.set_channel(operation.channel);
  launch.set_bucket(operation.bucket);
  launch.set_number(operation.number);
  return launch;
}

// The settings, with no more lanes and no larger chunks than each of these nodes allows.
EngineSettings SettingsFor(const NodeLinks& links, EngineSettings settings) {
  for (const auto& link : links) {
    const EngineLimits& limits = link->engine_limits();
    settings.lanes = std::min(settings.lanes, limits.lanes);
    settings.chunk_bytes = std::min(settings.chunk_bytes, limits.chunk_bytes);
  }
  return settings;
}

}  // namespace

EngineEpoch::EngineEpoch(std::uint64_t epoch, const Tenant& user, NodeLinks links,
                         const NodeGroupEnvironment& environment,
                         std::function<void(const absl::Status&)> failed)
    : epoch_(epoch),
      node_name_(environment.node_name),
      links_(std::move(links)),
      settings_(SettingsFor(links_, environment.engine)),
      clock_(environment.clock) {
  EngineSpec spec;
  spec.user = user;
  spec.address = environment.address;
  if (spec.address.empty() && !links_.empty()) {
    // The address that the first of the others reaches. If it is wrong, connecting fails with an
    // error that names it.
    spec.address = LocalAddressTowards(links_.front()->address()).value_or("");
  }
  spec.settings = settings_;
  spec.node_names = {environment.node_name};
  for (const auto& link : links_) spec.node_names.push_back(link->node_name());
  spec.failed = failed;
  node_names_ = spec.node_names;
  QueueConnect();
  exchange_ = std::make_unique<NodeExchange>(
      environment.node_name,
      [make = environment.make_engine, spec, store = store_]() mutable {
        spec.store = store.get();
        return make(spec);
      },
      std::move(failed));
  if (const absl::Status failure = exchange_->failure(); !failure.ok()) Suspect(failure);
}

void EngineEpoch::QueueConnect() {
  for (std::size_t i = 0; i < links_.size(); ++i) {
    v1::AttachResponse message;
    auto* const connect = message.mutable_connect_engine();
    connect->set_epoch(epoch_);
    connect->set_node(static_cast<std::uint32_t>(i + 1));
    *connect->mutable_node_names() = {node_names_.begin(), node_names_.end()};
    connect->set_address(links_[i]->address());
    connect->set_lanes(static_cast<std::uint32_t>(settings_.lanes));
    connect->set_chunk_bytes(settings_.chunk_bytes);
    connect->set_wire_type(static_cast<v1::WireType>(settings_.wire));
    connect->set_silence_limit_ms(
        static_cast<std::uint64_t>(absl::ToInt64Milliseconds(settings_.silence_limit)));
    links_[i]->Queue(std::move(message));
  }
}

bool EngineEpoch::Includes(const NodeLink* link) const {
  return std::any_of(links_.begin(), links_.end(),
                     [link](const auto& other) { return other.get() == link; });
}

bool EngineEpoch::HasEveryRank(const ReduceOperation& operation, const LinkedRanks& ranks) {
  const HostBuffers& buffers = BuffersOf(operation);
  for (std::size_t i = 0; i < operation.ranks.size(); ++i) {
    if (buffers[i] == nullptr && ranks.count(operation.ranks[i]) == 0) return false;
  }
  return true;
}

absl::Status EngineEpoch::Launch(ReduceOperation* operation, std::shared_ptr<void> owner,
                                 const MemoryAccount& account, const LinkedRanks& ranks,
                                 const LaunchDone& done, std::uint64_t* launch) {
  NodeWork work;
  work.dtype = operation->dtype;
  work.count = operation->count;
  work.op = operation->op;
  work.scale = operation->scale;
  work.measure = operation->measure;
  work.exact = operation->channel == 0;
  std::vector<v1::Launch> messages(links_.size(), MessageOf(*operation));
  const HostBuffers& buffers = BuffersOf(*operation);
  for (std::size_t i = 0; i < operation->ranks.size(); ++i) {
    // The root of a broadcast comes first on its node.
    const bool root = IsRoot(*operation, operation->ranks[i]);
    if (buffers[i] != nullptr) {
      work.buffers.insert(root ? work.buffers.begin() : work.buffers.end(), buffers[i]);
      if (root) work.root_node = 0;
      continue;
    }
    const LinkedRank& rank = ranks.at(operation->ranks[i]);
    const auto node = std::find(links_.begin(), links_.end(), rank.link) - links_.begin();
    auto* const incarnations = messages[static_cast<std::size_t>(node)].mutable_incarnations();
    incarnations->Add(rank.incarnation);
    if (!root) continue;
    work.root_node = static_cast<int>(node) + 1;
    incarnations->SwapElements(0, incarnations->size() - 1);
  }

  LaunchRecord begun;
  begun.operation = operation;
  begun.owner = std::move(owner);
  begun.times.start_ns = clock_->NowNs();
  std::vector<LaunchLedger::Participant> nodes = {nullptr};
  for (const auto& link : links_) nodes.push_back(link.get());
  *launch = ledger_.Begin(std::move(begun), nodes);

  for (std::size_t i = 0; i < links_.size(); ++i) {
    v1::AttachResponse message;
    v1::Launch* const out = message.mutable_launch();
    *out = std::move(messages[i]);
    out->set_epoch(epoch_);
    out->set_sequence(*launch);
    if (work.root_node >= 0) out->set_root_node(static_cast<std::uint32_t>(work.root_node));
    links_[i]->Queue(std::move(message));
  }
  // A node without ranks in the launch sees nothing of the result.
  const bool measures = !work.buffers.empty();
  work.done = [done, launch = *launch, measures](const absl::Status& status,
                                                 const GradientStats& stats) {
    done(launch, status, measures ? std::optional<GradientStats>(stats) : std::nullopt);
  };
  const absl::Status submitted = Submit(std::move(work), account);
  // The first reason counts, which may be that of another node.
  return submitted.ok() || suspicion_.ok() ? submitted : suspicion_;
}

absl::Status EngineEpoch::Submit(NodeWork work, const MemoryAccount& account) {
  if (work.root_node >= 0 && work.buffers.empty()) {
    auto charge = account.Reserve(work.count);
    if (!charge.ok()) {
      return MakeError(charge.status().code(), reason::kQuota,
                       absl::StrCat("node ", node_name_,
                                    ", which coordinates the job, has no memory for a broadcast "
                                    "between other nodes: ",
                                    charge.status().message()),
                       {{field::kNode, node_name_}});
    }
    work.keep.push_back(std::make_shared<ArenaQuota::Reservation>(*std::move(charge)));
  }
  return exchange_->Submit(std::move(work));
}

void EngineEpoch::Fail(const absl::Status& why) {
  if (failure_.ok()) failed_ns_ = clock_->NowNs();
  failure_ = why;
}

NodeLinks EngineEpoch::LateNodes() const {
  const std::uint64_t now_ns = clock_->NowNs();
  const bool failed_long_ago = !failure_.ok() && now_ns > failed_ns_ + kLateAfterFailureNs;
  NodeLinks late;
  if (ledger_.empty()) return late;
  const auto owing = ledger_.Late(now_ns, kLateNs);
  for (const auto& link : links_) {
    const bool is_late =
        owing.count(link.get()) > 0 || (failed_long_ago && !ledger_.OwedBy(link.get()).empty());
    if (is_late) late.push_back(link);
  }
  return late;
}

void EngineEpoch::Suspect(const absl::Status& why) {
  if (!suspicion_.ok()) return;
  suspicion_ = why;
  suspected_ns_ = clock_->NowNs();
}

absl::Status EngineEpoch::SuspectedFor(std::uint64_t patience_ns) const {
  return clock_->NowNs() >= suspected_ns_ + patience_ns ? suspicion_ : absl::OkStatus();
}

void EngineEpoch::End() {
  for (const auto& link : links_) {
    v1::AttachResponse message;
    message.mutable_engine_end()->set_epoch(epoch_);
    *message.mutable_engine_end()->mutable_status() = ToProto(failure_);
    link->Queue(std::move(message));
  }
  store_->Cancel(failure_);
}

void EngineEpoch::Reap(const std::shared_ptr<EngineEpoch>& epoch, Executor* reaper) {
  if (epoch->reaped_ || epoch->users_ > 0) return;
  epoch->reaped_ = true;
  reaper->Run([epoch, why = epoch->failure_] {
    epoch->exchange_->Abort(why);
    epoch->exchange_.reset();
  });
}

}  // namespace gradsync::daemon
