#include "daemon/peer/remote_worker.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/peer/peer_status.h"
#include "daemon/rpc/status_mapping.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// A driver may take long to end a worker.
constexpr std::uint64_t kLongestEndNs = 120'000'000'000;

// Most workers of one node in one job: more than a node can have GPUs.
constexpr std::size_t kMaxWorkers = 256;

// Whether a worker of another node takes such a call.
bool TravelsBetweenNodes(worker::Call::KindCase kind) {
  switch (kind) {
    case worker::Call::kNewNcclId:
    case worker::Call::kConnect:
    case worker::Call::kDisconnect:
    case worker::Call::kAwaitReady:
    case worker::Call::kLaunch:
    case worker::Call::kGiveUpStep:
      return true;
    default:
      return false;
  }
}

// Whether `reply` is what a call of this kind is answered with.
bool Answers(const worker::Reply& reply, worker::Call::KindCase call) {
  switch (call) {
    case worker::Call::kNewNcclId:
      return !reply.nccl_id().unique_id().empty() &&
             reply.nccl_id().unique_id().size() <= kMaxNcclIdBytes;
    case worker::Call::kConnect:
      return reply.has_connected();
    case worker::Call::kLaunch:
      return reply.has_launch_done();
    default:
      return reply.kind_case() == worker::Reply::KIND_NOT_SET;
  }
}

}  // namespace

// ---- RemoteWorker -------------------------------------------------------------------------------

RemoteWorker::RemoteWorker(std::shared_ptr<NodeLink> link, std::uint64_t number, std::string device,
                           const Clock* clock)
    : link_(std::move(link)), number_(number), device_(std::move(device)), clock_(clock) {}

void RemoteWorker::Call(worker::Call call, std::vector<UniqueFd> /*descriptors*/,
                        Answered answered) {
  if (call.kind_case() == worker::Call::kRemoveArena) return answered(Reply{});
  if (!TravelsBetweenNodes(call.kind_case())) {
    return answered(absl::UnimplementedError("this call is only for workers of this node"));
  }
  v1::AttachResponse message;
  v1::WorkerCall* const out = message.mutable_worker_call();
  out->set_call(call.SerializeAsString());
  absl::Status ended;
  {
    MutexLock lock(&mutex_);
    ended = end_;
    if (ended.ok()) {
      out->set_worker(number_);
      out->set_id(++last_id_);
      unanswered_[last_id_] = {call.kind_case(), answered};
      link_->Queue(std::move(message));
    }
  }
  if (!ended.ok()) return answered(ended);
  link_->Flush();
}

void RemoteWorker::Kill(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!end_.ok()) return;
    end_ = why;
    killed_ns_ = clock_->NowNs();
    v1::AttachResponse message;
    message.mutable_worker_release()->set_worker(number_);
    *message.mutable_worker_release()->mutable_status() = ToProto(why);
    link_->Queue(std::move(message));
  }
  link_->Flush();
}

absl::Status RemoteWorker::EndReason() const {
  MutexLock lock(&mutex_);
  return end_;
}

bool RemoteWorker::owes() const {
  MutexLock lock(&mutex_);
  return !unanswered_.empty();
}

bool RemoteWorker::IsLate(std::uint64_t now_ns) const {
  MutexLock lock(&mutex_);
  return killed_ns_ != 0 && !unanswered_.empty() && now_ns > killed_ns_ + kLongestEndNs;
}

absl::Status RemoteWorker::Malformed(absl::string_view what) const {
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   absl::StrCat("node ", link_->node_name(), ", worker on ", device_, ": ", what));
}

absl::Status RemoteWorker::Take(const v1::WorkerReply& reply) {
  Unanswered call;
  Reply answer;
  absl::Status why = StatusFromPeer(reply.status());
  {
    MutexLock lock(&mutex_);
    const auto found = unanswered_.find(reply.id());
    if (found == unanswered_.end()) {
      return Malformed(absl::StrCat("a reply to call ", reply.id(), ", which is not open"));
    }
    if (why.ok() && (!answer.message.ParseFromString(reply.reply()) ||
                     !Answers(answer.message, found->second.kind))) {
      return Malformed(absl::StrCat("a reply of another kind than call ", reply.id()));
    }
    call = std::move(found->second);
    unanswered_.erase(found);
    if (!why.ok()) {
      ErrorDetails details = DetailsOf(why);
      details.fields.emplace_back(field::kNode.text(), link_->node_name());
      why = MakeError(why.code(), details,
                      absl::StrCat("on node ", link_->node_name(), ": ", why.message()));
    }
    if (reply.ended() && end_.ok()) {
      end_ = why;
      if (why.ok()) {
        end_ = MakeError(
            absl::StatusCode::kUnavailable, reason::kWorkerLost,
            absl::StrCat("the worker on ", device_, " of node ", link_->node_name(), " has ended"),
            {{field::kNode, link_->node_name()}});
      }
    }
  }
  if (!why.ok()) {
    call.answered(why);
    return absl::OkStatus();
  }
  if (call.kind == worker::Call::kLaunch) {
    // Times of another node's clock mean nothing here.
    answer.message.mutable_launch_done()->clear_ready_ns();
    answer.message.mutable_launch_done()->set_finish_ns(clock_->NowNs());
  }
  call.answered(std::move(answer));
  return absl::OkStatus();
}

bool RemoteWorker::Release() {
  MutexLock lock(&mutex_);
  if (!unanswered_.empty()) return false;
  if (!end_.ok()) return true;
  end_ = MakeError(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                   absl::StrCat("the worker on ", device_, " of node ", link_->node_name(),
                                " was released, because nobody used it"),
                   {{field::kNode, link_->node_name()}});
  v1::AttachResponse message;
  message.mutable_worker_release()->set_worker(number_);
  link_->Queue(std::move(message));
  return true;
}

void RemoteWorker::Lost(const absl::Status& why) {
  std::map<std::uint64_t, Unanswered> unanswered;
  {
    MutexLock lock(&mutex_);
    if (end_.ok()) end_ = why;
    unanswered.swap(unanswered_);
  }
  for (auto& [id, call] : unanswered) call.answered(why);
}

// ---- RemoteWorkers ------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<RemoteWorker>> RemoteWorkers::Find(
    const std::shared_ptr<NodeLink>& link, std::uint64_t number, const std::string& device) {
  std::shared_ptr<RemoteWorker> found;
  std::vector<std::shared_ptr<RemoteWorker>> ended;
  {
    MutexLock lock(&mutex_);
    if (device.size() > kMaxDeviceBytes ||
        (workers_.size() >= kMaxWorkers && workers_.count(number) == 0)) {
      return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                       absl::StrCat("node ", link->node_name(),
                                    " has too many GPUs in one job, or "
                                    "one with too long a name"));
    }
    for (auto it = workers_.begin(); it != workers_.end();) {
      const bool other = it->second.worker->device() == device && it->first != number;
      if (other) ended.push_back(std::move(it->second.worker));
      it = other ? workers_.erase(it) : std::next(it);
    }
    std::shared_ptr<RemoteWorker>& worker = workers_[number].worker;
    if (worker == nullptr || worker->device() != device) {
      if (worker != nullptr) ended.push_back(worker);
      worker = std::make_shared<RemoteWorker>(link, number, device, clock_);
    }
    found = worker;
  }
  for (const auto& worker : ended) {
    worker->Lost(MakeError(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                           absl::StrCat("node ", link->node_name(), " has another worker on ",
                                        worker->device(), " by now")));
  }
  return found;
}

absl::Status RemoteWorkers::Take(const v1::WorkerReply& reply) {
  std::shared_ptr<RemoteWorker> worker;
  {
    MutexLock lock(&mutex_);
    const auto found = workers_.find(reply.worker());
    if (found == workers_.end()) return absl::OkStatus();
    worker = found->second.worker;
  }
  return worker->Take(reply);
}

void RemoteWorkers::Ended(std::uint64_t number, const absl::Status& why) {
  std::shared_ptr<RemoteWorker> worker;
  {
    MutexLock lock(&mutex_);
    const auto found = workers_.find(number);
    if (found == workers_.end()) return;
    worker = std::move(found->second.worker);
    workers_.erase(found);
  }
  worker->Lost(why);
}

bool RemoteWorkers::Tick(std::uint64_t now_ns) {
  std::vector<std::shared_ptr<RemoteWorker>> idle;  // destroyed without the lock
  bool all_end = true;
  MutexLock lock(&mutex_);
  for (auto it = workers_.begin(); it != workers_.end();) {
    Entry& entry = it->second;
    all_end = all_end && !entry.worker->IsLate(now_ns);
    if (entry.worker.use_count() > 1 || entry.worker->owes()) {
      entry.idle_since_ns = 0;
    } else if (entry.idle_since_ns == 0) {
      entry.idle_since_ns = now_ns;
    } else if (now_ns - entry.idle_since_ns > idle_limit_ns_ && entry.worker->Release()) {
      // Another thread may have got a reference meanwhile. Its calls are answered all the same.
      idle.push_back(std::move(entry.worker));
      it = workers_.erase(it);
      continue;
    }
    ++it;
  }
  return all_end;
}

void RemoteWorkers::Lost(const absl::Status& why) {
  std::map<std::uint64_t, Entry> workers;
  {
    MutexLock lock(&mutex_);
    workers.swap(workers_);
  }
  for (const auto& [number, entry] : workers) entry.worker->Lost(why);
}

}  // namespace gradsync::daemon
