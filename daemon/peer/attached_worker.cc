#include "daemon/peer/attached_worker.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/peer/rank_messages.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync {
namespace {

// Longer than any of NCCL's.
constexpr std::size_t kMaxIdBytes = 1024;
constexpr std::size_t kMaxDeviceBytes = 64;
// Of one node and job: more than it can have GPUs.
constexpr std::size_t kMaxWorkers = 256;
constexpr std::uint64_t kMillisecondNs = 1'000'000;

// As the worker of another node is told; false: it is not for another node.
bool Encode(const worker::Call& call, v1::WorkerCall* out) {
  switch (call.kind_case()) {
    case worker::Call::kNewNcclId:
      out->mutable_new_nccl_id();
      return true;
    case worker::Call::kConnect: {
      auto* const connect = out->mutable_connect();
      connect->set_unique_id(call.connect().unique_id());
      connect->set_rank(call.connect().rank());
      connect->set_ranks(call.connect().ranks());
      connect->set_limit_ms(call.connect().limit_ns() / kMillisecondNs);
      connect->set_max_ctas(call.connect().max_ctas());
      connect->set_algorithm(call.connect().algorithm());
      connect->set_protocol(call.connect().protocol());
      return true;
    }
    case worker::Call::kDisconnect:
      out->mutable_disconnect();
      return true;
    case worker::Call::kAwaitReady: {
      auto* const await = out->mutable_await_ready();
      await->set_layout(call.await_ready().layout());
      await->set_step(call.await_ready().step());
      await->set_bucket(call.await_ready().bucket());
      *await->mutable_arenas() = call.await_ready().arenas();
      return true;
    }
    case worker::Call::kLaunch: {
      const worker::Launch& launch = call.launch();
      auto* const to = out->mutable_launch();
      to->set_layout(launch.layout());
      to->set_step(launch.step());
      to->set_bucket(launch.bucket());
      to->set_dtype(static_cast<v1::DataType>(launch.data_type()));
      to->set_staging_dtype(static_cast<v1::DataType>(launch.staging_data_type()));
      to->set_count(launch.count());
      to->set_scale(launch.scale());
      to->set_step_buckets(launch.step_buckets());
      *to->mutable_arenas() = launch.arenas();
      return true;
    }
    case worker::Call::kGiveUpStep:
      out->mutable_give_up_step()->set_layout(call.give_up_step().layout());
      out->mutable_give_up_step()->set_step(call.give_up_step().step());
      return true;
    default:
      return false;
  }
}

// What a call that was carried out is answered with.
bool Fits(worker::Call::KindCase call, const v1::WorkerReply& reply) {
  switch (call) {
    case worker::Call::kNewNcclId:
      return !reply.nccl_id().empty() && reply.nccl_id().size() <= kMaxIdBytes;
    case worker::Call::kConnect:
      return reply.has_connected();
    case worker::Call::kLaunch:
      return reply.has_launched();
    default:
      return reply.kind_case() == v1::WorkerReply::KIND_NOT_SET;
  }
}

}  // namespace

// ---- AttachedWorker
// ------------------------------------------------------------------------------

AttachedWorker::AttachedWorker(std::shared_ptr<NodeLink> link, std::uint64_t number,
                               std::string device, const Clock* clock)
    : link_(std::move(link)), number_(number), device_(std::move(device)), clock_(clock) {}

AttachedWorker::~AttachedWorker() {
  if (over()) return;
  v1::AttachResponse message;
  message.mutable_worker_release()->set_worker(number_);
  link_->Queue(std::move(message));
}

void AttachedWorker::Call(worker::Call call, std::vector<UniqueFd> /*descriptors*/,
                          Answered answered) {
  if (call.kind_case() == worker::Call::kRemoveArena) return answered(Reply{});
  v1::AttachResponse message;
  v1::WorkerCall* const out = message.mutable_worker_call();
  if (!Encode(call, out)) {
    return answered(absl::UnimplementedError("no call to a worker of another node"));
  }
  absl::Status over;
  {
    MutexLock lock(&mutex_);
    over = over_;
    if (over.ok()) {
      out->set_worker(number_);
      out->set_id(++last_id_);
      unanswered_[last_id_] = {call.kind_case(), answered};
      link_->Queue(std::move(message));
    }
  }
  if (!over.ok()) return answered(over);
  link_->Flush();
}

void AttachedWorker::Kill(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!over_.ok()) return;
    over_ = why;
    v1::AttachResponse message;
    message.mutable_worker_release()->set_worker(number_);
    *message.mutable_worker_release()->mutable_status() = ToProto(why);
    link_->Queue(std::move(message));
  }
  link_->Flush();
}

bool AttachedWorker::over() const {
  MutexLock lock(&mutex_);
  return !over_.ok();
}

bool AttachedWorker::owes() const {
  MutexLock lock(&mutex_);
  return !unanswered_.empty();
}

absl::Status AttachedWorker::Malformed(absl::string_view what) const {
  return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED",
                   absl::StrCat("node ", link_->node_name(), ", worker on ", device_, ": ", what));
}

absl::Status AttachedWorker::Take(const v1::WorkerReply& reply) {
  Unanswered call;
  absl::Status why = StatusFromPeer(reply.status());
  {
    MutexLock lock(&mutex_);
    const auto found = unanswered_.find(reply.id());
    if (found == unanswered_.end()) {
      return Malformed(absl::StrCat("a reply to call ", reply.id(), ", which is not open"));
    }
    if (why.ok() && !Fits(found->second.kind, reply)) {
      return Malformed(absl::StrCat("a reply of another kind than call ", reply.id()));
    }
    call = std::move(found->second);
    unanswered_.erase(found);
    if (!why.ok()) {
      const ErrorDetails details = DetailsOf(why);
      auto fields = details.fields;
      fields.emplace_back("node", link_->node_name());
      why = MakeError(why.code(), details.reason,
                      absl::StrCat("on node ", link_->node_name(), ": ", why.message()), fields);
    }
    if (reply.over() && over_.ok()) {
      over_ = why.ok() ? absl::UnavailableError("a worker has gone") : why;
    }
  }
  if (!why.ok()) {
    call.answered(why);
    return absl::OkStatus();
  }
  Reply answer;
  if (call.kind == worker::Call::kNewNcclId) {
    answer.message.mutable_nccl_id()->set_unique_id(reply.nccl_id());
  } else if (call.kind == worker::Call::kConnect) {
    answer.message.mutable_connected()->set_mps(reply.connected().mps());
  } else if (call.kind == worker::Call::kLaunch) {
    worker::LaunchDone* const done = answer.message.mutable_launch_done();
    done->set_finish_ns(clock_->NowNs());
    done->set_sum_of_squares(reply.launched().sum_of_squares());
    done->set_non_finite(reply.launched().non_finite());
    done->set_void_step(reply.launched().void_step());
  }
  call.answered(std::move(answer));
  return absl::OkStatus();
}

void AttachedWorker::Lost(const absl::Status& why) {
  std::map<std::uint64_t, Unanswered> unanswered;
  {
    MutexLock lock(&mutex_);
    if (over_.ok()) over_ = why;
    unanswered.swap(unanswered_);
  }
  for (auto& [id, call] : unanswered) call.answered(why);
}

// ---- AttachedWorkers
// -----------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<AttachedWorker>> AttachedWorkers::Find(
    const std::shared_ptr<NodeLink>& link, std::uint64_t number, const std::string& device) {
  std::shared_ptr<AttachedWorker> found;
  std::vector<std::shared_ptr<AttachedWorker>> ended;
  {
    MutexLock lock(&mutex_);
    if (device.size() > kMaxDeviceBytes ||
        (workers_.size() >= kMaxWorkers && workers_.count(number) == 0)) {
      return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED",
                       absl::StrCat("node ", link->node_name(),
                                    " has too many GPUs in one job, or "
                                    "one with too long a name"));
    }
    for (auto it = workers_.begin(); it != workers_.end();) {
      const bool other = it->second.worker->device() == device && it->first != number;
      if (other) ended.push_back(std::move(it->second.worker));
      it = other ? workers_.erase(it) : std::next(it);
    }
    std::shared_ptr<AttachedWorker>& worker = workers_[number].worker;
    if (worker == nullptr || worker->device() != device) {
      if (worker != nullptr) ended.push_back(worker);
      worker = std::make_shared<AttachedWorker>(link, number, device, clock_);
    }
    found = worker;
  }
  for (const auto& worker : ended) {
    worker->Lost(MakeError(absl::StatusCode::kUnavailable, "WORKER_LOST",
                           absl::StrCat("node ", link->node_name(), " has another worker on ",
                                        worker->device(), " by now")));
  }
  return found;
}

absl::Status AttachedWorkers::Take(const v1::WorkerReply& reply) {
  std::shared_ptr<AttachedWorker> worker;
  {
    MutexLock lock(&mutex_);
    const auto found = workers_.find(reply.worker());
    if (found == workers_.end()) return absl::OkStatus();
    worker = found->second.worker;
  }
  return worker->Take(reply);
}

void AttachedWorkers::Gone(std::uint64_t number, const absl::Status& why) {
  std::shared_ptr<AttachedWorker> worker;
  {
    MutexLock lock(&mutex_);
    const auto found = workers_.find(number);
    if (found == workers_.end()) return;
    worker = std::move(found->second.worker);
    workers_.erase(found);
  }
  worker->Lost(why);
}

void AttachedWorkers::Tick(std::uint64_t now_ns) {
  std::vector<std::shared_ptr<AttachedWorker>> idle;  // let go of without the lock
  MutexLock lock(&mutex_);
  for (auto it = workers_.begin(); it != workers_.end();) {
    Entry& entry = it->second;
    if (entry.worker.use_count() > 1 || entry.worker->owes()) {
      entry.idle_since_ns = 0;
    } else if (entry.idle_since_ns == 0) {
      entry.idle_since_ns = now_ns;
    } else if (now_ns - entry.idle_since_ns > idle_limit_ns_) {
      idle.push_back(std::move(entry.worker));
      it = workers_.erase(it);
      continue;
    }
    ++it;
  }
}

void AttachedWorkers::Lost(const absl::Status& why) {
  std::map<std::uint64_t, Entry> workers;
  {
    MutexLock lock(&mutex_);
    workers.swap(workers_);
  }
  for (const auto& [number, entry] : workers) entry.worker->Lost(why);
}

}  // namespace gradsync
