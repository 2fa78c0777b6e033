#include "daemon/peer/worker_proxy_server.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/peer/peer_status.h"
#include "daemon/reduce/gpu_staging.h"
#include "daemon/rpc/status_mapping.h"
#include "proto/gradsync/limits.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kMaxConnectNs = 3'600'000'000'000;
constexpr std::uint32_t kMaxRanks = 1 << 20;
// Elements of a bucket: more than any GPU holds.
constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 44;
// A call on the wire: the longest one names the arenas of all ranks of a node.
constexpr std::size_t kMaxCallBytes = 64 << 10;
// What a call takes until it is answered, beside itself.
constexpr std::size_t kCallBytes = 512;

absl::Status Malformed(absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kMalformed,
                   absl::StrCat("the coordinator called a worker ", what));
}

// A name that NCCL may know, or none.
bool IsName(const std::string& text) {
  return text.size() <= 32 && std::all_of(text.begin(), text.end(), absl::ascii_isalnum);
}

absl::Status WorkerLost() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                   "the GPU's worker has ended");
}

}  // namespace

std::uint64_t WorkerProxyServer::NumberOf(const std::shared_ptr<WorkerPort>& worker) {
  MutexLock lock(&mutex_);
  for (const auto& [number, entry] : workers_) {
    if (entry.port.lock() == worker) return number;
  }
  workers_[++last_number_].port = worker;
  return last_number_;
}

absl::Status WorkerProxyServer::Check(const WorkerPort* worker, worker::Call* call,
                                      Pages* semaphores) const {
  switch (call->kind_case()) {
    case worker::Call::kNewNcclId:
    case worker::Call::kDisconnect:
    case worker::Call::kGiveUpStep:
      return absl::OkStatus();
    case worker::Call::kConnect: {
      const worker::Connect& connect = call->connect();
      if (connect.ranks() > kMaxRanks || connect.rank() >= connect.ranks() ||
          connect.unique_id().empty() || connect.unique_id().size() > kMaxNcclIdBytes ||
          connect.limit_ns() > kMaxConnectNs || connect.max_ctas() > NcclSettings::kMaxCtas ||
          !IsName(connect.algorithm()) || !IsName(connect.protocol())) {
        return Malformed("to connect, with numbers out of bounds");
      }
      return absl::OkStatus();
    }
    case worker::Call::kAwaitReady: {
      const worker::AwaitReady& await = call->await_ready();
      std::set<std::uint64_t> seen;
      for (const std::uint64_t arena : await.arenas()) {
        const auto bucket = owner_.find(arena, await.bucket(), await.step());
        if (!bucket.ok()) return bucket.status();
        if (bucket->worker != worker) return Malformed("about an arena of another worker");
        if (!seen.insert(arena).second) return Malformed("about an arena twice");
      }
      return absl::OkStatus();
    }
    case worker::Call::kLaunch:
      return CheckLaunch(worker, call->mutable_launch(), semaphores);
    default:
      break;
  }
  return MakeError(absl::StatusCode::kUnimplemented, reason::kVersion,
                   "the coordinator's daemon makes a call that this node's does not know: run the "
                   "same version on both");
}

absl::Status WorkerProxyServer::CheckLaunch(const WorkerPort* worker, worker::Launch* launch,
                                            Pages* semaphores) const {
  const auto dtype = static_cast<DataType>(launch->data_type());
  const auto staging = static_cast<DataType>(launch->staging_data_type());
  // A type of more than 8 bits would be cut to one that exists.
  if (launch->data_type() > UINT8_MAX || launch->staging_data_type() > UINT8_MAX ||
      !CanBeStagedAs(dtype, staging) || launch->count() > kMaxCount ||
      launch->step_buckets() == 0 || launch->void_contributions() != 0) {
    return Malformed("with a launch of an unknown type, or of too many elements");
  }
  launch->set_measure(true);
  launch->clear_offset();
  launch->clear_verdict_offset();
  std::set<std::uint64_t> seen;
  for (const std::uint64_t arena : launch->arenas()) {
    auto bucket = owner_.find(arena, launch->bucket(), launch->step());
    if (!bucket.ok()) return bucket.status();
    const bool first = seen.empty();
    if (bucket->worker != worker || bucket->dtype != dtype || bucket->count != launch->count() ||
        bucket->step_buckets != launch->step_buckets() || !seen.insert(arena).second ||
        (!first && (bucket->offset != launch->offset() ||
                    bucket->verdict_offset != launch->verdict_offset()))) {
      return Malformed(absl::StrCat("with a launch of bucket ", launch->bucket(), " on arena ",
                                    arena, ", which has another one or lies elsewhere"));
    }
    launch->set_offset(bucket->offset);
    launch->set_verdict_offset(bucket->verdict_offset);
    semaphores->push_back(std::move(bucket->semaphores));
  }
  return absl::OkStatus();
}

void WorkerProxyServer::Call(const v1::WorkerCall& message) {
  OpenCall id{message.worker(), message.id()};
  worker::Call call;
  const bool parsed =
      message.call().size() <= kMaxCallBytes && call.ParseFromString(message.call());
  const std::size_t bytes = kCallBytes + call.SpaceUsedLong();
  std::shared_ptr<WorkerPort> worker;
  absl::Status charged;
  {
    MutexLock lock(&mutex_);
    ++owed_;
    charged = charge_.Hold(owner_.account, owed_bytes_ + bytes);
    if (charged.ok()) id.bytes = bytes;
    owed_bytes_ += id.bytes;
    const auto found = workers_.find(id.worker);
    if (found != workers_.end()) {
      ++found->second.owed;
      worker = found->second.port.lock();
      if (call.has_connect()) found->second.kept = worker;
    }
  }
  if (worker == nullptr) return Answer(id, nullptr, WorkerLost());
  if (!parsed) return Answer(id, worker.get(), Malformed("with bytes that are no call"));
  if (!charged.ok()) return Answer(id, worker.get(), charged);
  Pages semaphores;
  const absl::Status checked = Check(worker.get(), &call, &semaphores);
  if (!checked.ok()) return Answer(id, worker.get(), checked);
  const std::uint32_t bucket = call.launch().bucket();
  WorkerPort* const port = worker.get();
  // The callback holds the worker, which so is not idle while it owes the answer.
  port->Call(std::move(call), {},
             [self = shared_from_this(), id, bucket, semaphores = std::move(semaphores),
              worker = std::move(worker)](const absl::StatusOr<WorkerPort::Reply>& reply) {
               if (reply.ok()) {
                 // The GPU itself has written the done words; host waits still sleep.
                 for (const auto& page : semaphores) page->WakeDone(bucket);
               }
               self->Answer(id, worker.get(), reply);
             });
}

void WorkerProxyServer::Answer(const OpenCall& id, const WorkerPort* worker,
                               const absl::StatusOr<WorkerPort::Reply>& reply) {
  v1::AttachRequest message;
  v1::WorkerReply* const out = message.mutable_worker_reply();
  out->set_worker(id.worker);
  out->set_id(id.call);
  out->set_ended(worker == nullptr || worker->HasEnded());
  if (reply.ok()) {
    out->set_reply(reply->message.SerializeAsString());
  } else {
    *out->mutable_status() = ToProto(reply.status());
  }
  owner_.send(std::move(message));
  {
    MutexLock lock(&mutex_);
    --owed_;
    owed_bytes_ -= id.bytes;
    if (owed_bytes_ == 0) charge_.Release();
    const auto found = workers_.find(id.worker);
    if (found != workers_.end()) --found->second.owed;
  }
  owner_.settled();
}

void WorkerProxyServer::Release(const v1::WorkerRelease& release) {
  std::shared_ptr<WorkerPort> kept, port;
  {
    MutexLock lock(&mutex_);
    const auto found = workers_.find(release.worker());
    if (found == workers_.end()) return;
    port = found->second.port.lock();
    kept = std::exchange(found->second.kept, nullptr);
  }
  const absl::Status why = StatusFromPeer(release.status());
  if (!why.ok() && port != nullptr) {
    port->Kill(why);
  } else if (kept != nullptr) {
    worker::Call call;
    call.mutable_disconnect();
    kept->Call(std::move(call), {}, [kept](const auto&) {});
  }
}

void WorkerProxyServer::Tick() {
  std::vector<std::uint64_t> ended;
  {
    MutexLock lock(&mutex_);
    for (auto it = workers_.begin(); it != workers_.end();) {
      const auto port = it->second.port.lock();
      const bool has_ended = it->second.owed == 0 && (port == nullptr || port->HasEnded());
      if (has_ended) ended.push_back(it->first);
      it = has_ended ? workers_.erase(it) : std::next(it);
    }
  }
  for (const std::uint64_t number : ended) {
    v1::AttachRequest message;
    message.mutable_worker_ended()->set_worker(number);
    *message.mutable_worker_ended()->mutable_status() = ToProto(WorkerLost());
    owner_.send(std::move(message));
  }
}

void WorkerProxyServer::End(const absl::Status& why) {
  std::map<std::uint64_t, Worker> workers;
  {
    MutexLock lock(&mutex_);
    workers.swap(workers_);
  }
  for (const auto& [number, entry] : workers) {
    const auto port = entry.port.lock();
    if (port == nullptr) continue;
    if (entry.owed > 0) {
      port->Kill(why);
    } else if (entry.kept != nullptr) {
      worker::Call call;
      call.mutable_disconnect();
      port->Call(std::move(call), {}, [port](const auto&) {});
    }
  }
}

bool WorkerProxyServer::busy() const {
  MutexLock lock(&mutex_);
  return owed_ > 0;
}

}  // namespace gradsync::daemon
