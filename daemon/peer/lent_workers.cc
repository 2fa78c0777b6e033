#include "daemon/peer/lent_workers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/peer/rank_messages.h"
#include "daemon/reduce/gpu_staging.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync {
namespace {

constexpr std::uint64_t kMillisecondNs = 1'000'000;
constexpr std::uint64_t kMaxConnectMs = 3'600'000;
constexpr std::uint32_t kMaxRanks = 1 << 20;
constexpr std::uint32_t kMaxCtas = 1024;
constexpr std::size_t kMaxIdBytes = 1024;
// Elements of a bucket: more than any GPU holds.
constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 44;

absl::Status Malformed(absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "MALFORMED",
                   absl::StrCat("the coordinator called a worker ", what));
}

// One of NCCL's, or none.
bool IsName(const std::string& text) {
  return text.size() <= 32 && std::all_of(text.begin(), text.end(), absl::ascii_isalnum);
}

absl::Status Gone() {
  return MakeError(absl::StatusCode::kUnavailable, "WORKER_LOST", "the GPU's worker has ended");
}

}  // namespace

std::uint64_t LentWorkers::NumberOf(const std::shared_ptr<WorkerPort>& worker) {
  MutexLock lock(&mutex_);
  for (const auto& [number, lent] : workers_) {
    if (lent.port.lock() == worker) return number;
  }
  workers_[++last_number_].port = worker;
  return last_number_;
}

absl::StatusOr<worker::Call> LentWorkers::Check(const v1::WorkerCall& call,
                                                const WorkerPort* worker, Pages* semaphores) const {
  worker::Call out;
  switch (call.kind_case()) {
    case v1::WorkerCall::kNewNcclId:
      out.mutable_new_nccl_id();
      return out;
    case v1::WorkerCall::kConnect: {
      const v1::WorkerCall::Connect& connect = call.connect();
      if (connect.ranks() > kMaxRanks || connect.rank() >= connect.ranks() ||
          connect.unique_id().empty() || connect.unique_id().size() > kMaxIdBytes ||
          connect.limit_ms() > kMaxConnectMs || connect.max_ctas() > kMaxCtas ||
          !IsName(connect.algorithm()) || !IsName(connect.protocol())) {
        return Malformed("to connect, with numbers out of their bounds");
      }
      worker::Connect* const to = out.mutable_connect();
      to->set_unique_id(connect.unique_id());
      to->set_rank(connect.rank());
      to->set_ranks(connect.ranks());
      to->set_limit_ns(connect.limit_ms() * kMillisecondNs);
      to->set_max_ctas(connect.max_ctas());
      to->set_algorithm(connect.algorithm());
      to->set_protocol(connect.protocol());
      return out;
    }
    case v1::WorkerCall::kDisconnect:
      out.mutable_disconnect();
      return out;
    case v1::WorkerCall::kAwaitReady: {
      const v1::WorkerCall::AwaitReady& await = call.await_ready();
      worker::AwaitReady* const to = out.mutable_await_ready();
      to->set_layout(await.layout());
      to->set_step(await.step());
      to->set_bucket(await.bucket());
      for (const std::uint64_t arena : await.arenas()) {
        const auto bucket = owner_.find(arena, await.bucket(), await.step());
        if (!bucket.ok()) return bucket.status();
        if (bucket->worker != worker) return Malformed("about an arena of another one");
        to->add_arenas(arena);
      }
      return out;
    }
    case v1::WorkerCall::kLaunch: {
      const absl::Status status =
          CheckLaunch(call.launch(), worker, out.mutable_launch(), semaphores);
      if (!status.ok()) return status;
      return out;
    }
    case v1::WorkerCall::kGiveUpStep:
      out.mutable_give_up_step()->set_layout(call.give_up_step().layout());
      out.mutable_give_up_step()->set_step(call.give_up_step().step());
      return out;
    case v1::WorkerCall::KIND_NOT_SET:
      break;
  }
  return MakeError(absl::StatusCode::kUnimplemented, "VERSION",
                   "the coordinator's daemon makes a call that this node's does not know: run the "
                   "same version on both");
}

absl::Status LentWorkers::CheckLaunch(const v1::WorkerCall::Launch& launch,
                                      const WorkerPort* worker, worker::Launch* out,
                                      Pages* semaphores) const {
  const auto dtype = static_cast<DataType>(launch.dtype());
  const auto staging = static_cast<DataType>(launch.staging_dtype());
  if (!CanBeStagedAs(dtype, staging) || launch.count() > kMaxCount || launch.step_buckets() == 0) {
    return Malformed("with a launch of elements of no type, or too many");
  }
  out->set_layout(launch.layout());
  out->set_step(launch.step());
  out->set_bucket(launch.bucket());
  out->set_data_type(static_cast<std::uint32_t>(dtype));
  out->set_staging_data_type(static_cast<std::uint32_t>(staging));
  out->set_count(launch.count());
  out->set_scale(launch.scale());
  out->set_measure(true);
  out->set_step_buckets(launch.step_buckets());
  for (const std::uint64_t arena : launch.arenas()) {
    auto bucket = owner_.find(arena, launch.bucket(), launch.step());
    if (!bucket.ok()) return bucket.status();
    const auto& before = out->arenas();
    const bool first = before.empty();
    if (bucket->worker != worker || bucket->dtype != dtype || bucket->count != launch.count() ||
        bucket->step_buckets != launch.step_buckets() ||
        std::find(before.begin(), before.end(), arena) != before.end() ||
        (!first &&
         (bucket->offset != out->offset() || bucket->verdict_offset != out->verdict_offset()))) {
      return Malformed(absl::StrCat("with a launch of bucket ", launch.bucket(), " on arena ",
                                    arena, ", which has another one or lies elsewhere"));
    }
    out->set_offset(bucket->offset);
    out->set_verdict_offset(bucket->verdict_offset);
    out->add_arenas(arena);
    semaphores->push_back(std::move(bucket->semaphores));
  }
  return absl::OkStatus();
}

void LentWorkers::Call(const v1::WorkerCall& call) {
  std::shared_ptr<WorkerPort> worker;
  {
    MutexLock lock(&mutex_);
    ++owed_;
    const auto found = workers_.find(call.worker());
    if (found != workers_.end()) {
      ++found->second.owed;
      worker = found->second.port.lock();
      if (call.has_connect()) found->second.kept = worker;
    }
  }
  v1::WorkerCall brief;
  brief.set_worker(call.worker());
  brief.set_id(call.id());
  if (worker == nullptr) return Answer(brief, nullptr, Gone());
  Pages semaphores;
  auto checked = Check(call, worker.get(), &semaphores);
  if (!checked.ok()) return Answer(brief, worker.get(), checked.status());
  // With the worker: it is not idle as long as it owes this.
  WorkerPort* const port = worker.get();
  port->Call(*std::move(checked), {},
             [self = shared_from_this(), brief, bucket = call.launch().bucket(),
              semaphores = std::move(semaphores),
              worker = std::move(worker)](const absl::StatusOr<WorkerPort::Reply>& reply) {
               if (reply.ok()) {
                 // The GPU has written the words itself.
                 for (const auto& page : semaphores) page->WakeDone(bucket);
               }
               self->Answer(brief, worker.get(), reply);
             });
}

void LentWorkers::Answer(const v1::WorkerCall& call, const WorkerPort* worker,
                         const absl::StatusOr<WorkerPort::Reply>& reply) {
  v1::AttachRequest message;
  v1::WorkerReply* const out = message.mutable_worker_reply();
  out->set_worker(call.worker());
  out->set_id(call.id());
  out->set_over(worker == nullptr || worker->over());
  if (!reply.ok()) {
    *out->mutable_status() = ToProto(reply.status());
  } else if (reply->message.has_nccl_id()) {
    out->set_nccl_id(reply->message.nccl_id().unique_id());
  } else if (reply->message.has_connected()) {
    out->mutable_connected()->set_mps(reply->message.connected().mps());
  } else if (reply->message.has_launch_done()) {
    const worker::LaunchDone& done = reply->message.launch_done();
    out->mutable_launched()->set_sum_of_squares(done.sum_of_squares());
    out->mutable_launched()->set_non_finite(done.non_finite());
    out->mutable_launched()->set_void_step(done.void_step());
  }
  owner_.send(std::move(message));
  {
    MutexLock lock(&mutex_);
    --owed_;
    const auto found = workers_.find(call.worker());
    if (found != workers_.end()) --found->second.owed;
  }
  owner_.settled();
}

void LentWorkers::Release(const v1::WorkerRelease& release) {
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

void LentWorkers::Tick() {
  std::vector<std::uint64_t> gone;
  {
    MutexLock lock(&mutex_);
    for (auto it = workers_.begin(); it != workers_.end();) {
      const auto port = it->second.port.lock();
      const bool ended = it->second.owed == 0 && (port == nullptr || port->over());
      if (ended) gone.push_back(it->first);
      it = ended ? workers_.erase(it) : std::next(it);
    }
  }
  for (const std::uint64_t number : gone) {
    v1::AttachRequest message;
    message.mutable_worker_gone()->set_worker(number);
    *message.mutable_worker_gone()->mutable_status() = ToProto(Gone());
    owner_.send(std::move(message));
  }
}

void LentWorkers::End(const absl::Status& why) {
  std::map<std::uint64_t, Worker> workers;
  {
    MutexLock lock(&mutex_);
    workers.swap(workers_);
  }
  for (auto& [number, lent] : workers) {
    const auto port = lent.port.lock();
    if (port == nullptr) continue;
    if (lent.owed > 0) {
      port->Kill(why);
    } else if (lent.kept != nullptr) {
      worker::Call call;
      call.mutable_disconnect();
      port->Call(std::move(call), {}, [port](const auto&) {});
    }
  }
}

bool LentWorkers::busy() const {
  MutexLock lock(&mutex_);
  return owed_ > 0;
}

}  // namespace gradsync
