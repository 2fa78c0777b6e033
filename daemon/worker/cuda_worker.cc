#include "daemon/worker/cuda_worker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/cuda/cuda_device.h"
#include "daemon/cuda/cuda_errors.h"
#include "daemon/cuda/used_memory.h"
#include "daemon/engine/nccl_communicator.h"
#include "daemon/reduce/gpu_staging.h"
#include "daemon/worker/worker_error.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

constexpr int kExitFailed = 1;
// NCCL sees over its sockets within a millisecond that a remote worker is lost. The daemon of that
// worker knows more: how it was lost. The worker that only sees the loss gives that word this time.
constexpr std::uint64_t kRemoteLossNs = 250'000'000;
// How many ids a worker makes that do not connect. A coordinator asks for one each time it connects
// the job's workers, and most times they do connect.
constexpr std::size_t kMostUnusedIds = 16;

void Describe(const CudaDevice& device, worker::Device* described) {
  described->set_uuid(device.uuid);
  described->set_name(device.name);
  described->set_memory_bytes(device.memory_bytes);
  described->set_mps(device.mps);
}

// The error for a job on several GPUs, if NCCL could not be opened because of `why`.
absl::Status WithoutNccl(const absl::Status& why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, DetailsOf(why),
                   absl::StrCat("a job on several GPUs needs NCCL: ", why.message(), "; install ",
                                NcclVersionText(kLeastNcclVersion),
                                " or newer where the daemon's loader finds it, or name it "
                                "(nccl_library), and start the daemon again"));
}

}  // namespace

CudaWorker::CudaWorker(const MessageSocket* socket)
    : socket_(socket),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Issue(); }) {}

CudaWorker::~CudaWorker() { thread_.join(); }

void CudaWorker::Post(worker::Call call, std::vector<UniqueFd> descriptors) {
  {
    const MutexLock lock(&mutex_);
    posted_.push_back({std::move(call), std::move(descriptors)});
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void CudaWorker::Issue() {
  prctl(PR_SET_NAME, "issue");
  prctl(PR_SET_TIMERSLACK, 1'000UL);  // nanoseconds; 50,000 by default
  while (!stopped()) {
    for (Posted& posted : Take()) Handle(std::move(posted));
    if (launches_ != nullptr) Advance();
    if (connecting()) AdvanceConnecting();
  }
}

std::deque<CudaWorker::Posted> CudaWorker::Take() {
  std::vector<pollfd> waited{{wake_.get(), POLLIN, 0}};
  if (arenas_ != nullptr) {
    const std::vector<pollfd> trainers = arenas_->AwaitedTrainers();
    waited.insert(waited.end(), trainers.begin(), trainers.end());
  }
  const bool was_idle = idle();
  const timespec pause = Pause();
  ppoll(waited.data(), waited.size(), was_idle ? nullptr : &pause, nullptr);
  if (was_idle) pace_.Restart(MonotonicNowNs());
  if (waited.front().revents != 0) {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
  }
  // Not while launches run: freeing waits for the kernels on the GPU.
  if (waited.size() > 1 && launches_->at_rest()) {
    ReplyToRemovals(arenas_->FreeOfEnded(absl::MakeConstSpan(waited).subspan(1)));
  }
  const MutexLock lock(&mutex_);
  return std::exchange(posted_, {});
}

timespec CudaWorker::Pause() const {
  return {0, static_cast<std::int64_t>(pace_.PauseNs(MonotonicNowNs()))};
}

bool CudaWorker::connecting() const {
  return communicator_ != nullptr && communicator_->connecting();
}

bool CudaWorker::idle() const {
  return !connecting() && !remote_loss_.has_value() &&
         (launches_ == nullptr || (launches_->idle() && ready_waits_.empty() &&
                                   !arenas_->waits_for_launches() && postponed_.empty()));
}

void CudaWorker::Handle(Posted posted) {
  const worker::Call& call = posted.call;
  worker::Reply reply;
  reply.set_call(call.id());
  UniqueFd exported;
  absl::Status status;
  switch (call.kind_case()) {
    case worker::Call::kStart:
      status = Start(call.start(), reply.mutable_started());
      break;
    case worker::Call::kAddArena:
      // Staging can grow only while no bucket is in it.
      if (launches_ != nullptr && !launches_->at_rest() &&
          !staging_->Holds(call.add_arena().staging_bytes())) {
        postponed_.push_back(std::move(posted));
        return;
      }
      status = AddArena(call.add_arena(), std::move(posted.descriptors),
                        reply.mutable_arena_added(), &exported);
      break;
    case worker::Call::kRemoveArena:
      status = RemoveArena(call.id(), call.remove_arena());
      if (status.ok()) return;
      break;
    case worker::Call::kAwaitReady:
      status = AwaitReady(call.id(), call.await_ready());
      if (status.ok()) return;
      break;
    case worker::Call::kLaunch:
      status = Launch(call.id(), call.launch());
      if (status.ok()) return;
      break;
    case worker::Call::kNewNcclId: {
      const auto id = NewNcclId();
      status = id.status();
      if (id.ok()) reply.mutable_nccl_id()->set_unique_id(*id);
      break;
    }
    case worker::Call::kConnect:
      status = Connect(call.id(), call.connect());
      if (status.ok()) return;
      break;
    case worker::Call::kDisconnect:
      status = Disconnect();
      break;
    case worker::Call::kGiveUpStep:
      if (launches_ != nullptr) {
        launches_->GiveUp(call.give_up_step().layout(), call.give_up_step().step());
        ready_waits_.GiveUp(call.give_up_step().layout(), call.give_up_step().step());
      }
      break;
    case worker::Call::kPing:
      if (context_ != nullptr) CheckGpu();
      if (call.ping().memory()) *reply.mutable_pong() = Memory();
      break;
    case worker::Call::kStop:
      Stop(call.id());
      return;
    case worker::Call::kEngineStart:
    case worker::Call::kEngineValue:
    case worker::Call::kEngineExchange:
    case worker::Call::kEngineAbort:
    case worker::Call::KIND_NOT_SET:
      status = absl::UnimplementedError("this worker does not know the call");
      break;
  }
  if (!status.ok()) {
    if (context_ != nullptr) CheckGpu();
    reply.clear_kind();
    *reply.mutable_error() = EncodeError(status);
  }
  Reply(reply, exported.valid() ? &exported : nullptr);
}

void CudaWorker::CheckGpu() const {
  const CUresult result = driver_->cuStreamQuery.Result(context_->memory_stream());
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) return;
  Fail(driver_->StatusOf(result, "cuStreamQuery"));
}

CudaWorker::GpuBytes CudaWorker::MemoryInfo() const {
  GpuBytes bytes;
  const CUresult result = driver_->cuMemGetInfo.Result(&bytes.free, &bytes.total);
  if (EndsProcess(result)) Fail(driver_->StatusOf(result, "cuMemGetInfo"));
  return bytes;
}

absl::Status CudaWorker::WithFreeBytes(const absl::Status& error) const {
  const ErrorDetails details = DetailsOf(error);
  GpuBytes bytes;
  if (details.reason != reason::kNcclCudaError ||
      driver_->cuMemGetInfo.Result(&bytes.free, &bytes.total) != CUDA_SUCCESS) {
    return error;
  }
  return MakeError(
      error.code(), details,
      absl::StrCat(error.message(), ": the GPU has ", bytes.free, " bytes free of ", bytes.total,
                   "; if that is too little, fewer thread blocks (max_ctas) need less"));
}

absl::Status CudaWorker::Start(const worker::Start& start, worker::Started* started) {
  if (driver_ != nullptr) return absl::FailedPreconditionError("the worker is started already");
  auto driver = CudaDriver::Open(start.cuda_library());
  if (!driver.ok()) return driver.status();
  driver_ = *std::move(driver);
  const CUresult initialized = driver_->cuInit.Result(0);
  // For a process that names a missing MIG instance, there is no device at all.
  if (initialized == CUDA_ERROR_NO_DEVICE && !start.device().empty()) {
    return CudaDeviceNotVisible(start.device(), {});
  }
  int version = 0;
  absl::Status status = driver_->StatusOfInit(initialized);
  if (status.ok()) status = driver_->cuDriverGetVersion(&version);
  if (!status.ok()) return status;
  started->set_driver_version(version);

  nccl_ = NcclLibrary::Open(start.nccl_library());
  if (nccl_.ok()) {
    started->set_nccl_version(NcclVersionText((*nccl_)->version()));
  } else {
    started->set_nccl_error(std::string(nccl_.status().message()));
  }

  if (!start.device().empty()) return OpenDevice(start, started);
  const auto devices = VisibleCudaDevices(*driver_);
  if (!devices.ok()) return devices.status();
  for (const CudaDevice& device : *devices) Describe(device, started->add_devices());
  return absl::OkStatus();
}

absl::Status CudaWorker::OpenDevice(const worker::Start& start, worker::Started* started) {
  const auto device = FindCudaDevice(*driver_, start.device());
  if (!device.ok()) return device.status();
  if (const absl::Status status = CheckCudaDeviceUsable(*driver_, *device); !status.ok()) {
    return status;
  }
  if (const absl::Status status =
          CheckMpsUsers(*device, geteuid(), start.user(), start.mps_multiuser());
      !status.ok()) {
    return status;
  }
  Describe(*device, started->add_devices());
  const auto used_before = UsedGpuBytes(start.nvml_library(), device->uuid);
  auto context = CudaContext::Open(driver_.get(), *device);
  if (!context.ok()) return context.status();
  context_ = *std::move(context);
  auto combine = CudaCombine::Load(driver_.get(), device->handle);
  if (!combine.ok()) return combine.status();
  combine_ = *std::move(combine);
  staging_ = std::make_unique<CudaStagingPool>(context_.get());
  if (const absl::Status status = staging_->Open(); !status.ok()) return status;
  const auto used = UsedGpuBytes(start.nvml_library(), device->uuid);
  if (used.has_value() && used_before.has_value()) {
    context_bytes_ = *used - std::min(*used, *used_before);
  }
  communicator_ = std::make_unique<CudaCommunicator>(
      nccl_.ok() ? nccl_->get() : nullptr, staging_.get(),
      CudaCommunicator::Process{[this] { return MemoryInfo().free; },
                                [this](const absl::Status& why) { Fail(why); }});
  arenas_ = std::make_unique<CudaArenas>(context_.get());
  launches_ = std::make_unique<CudaLaunchQueue>(context_.get(), combine_.get(), staging_.get(),
                                                start.operation_limit_ns());
  return absl::OkStatus();
}

absl::Status CudaWorker::AddArena(const worker::AddArena& add, std::vector<UniqueFd> descriptors,
                                  worker::ArenaAdded* added, UniqueFd* exported) {
  if (launches_ == nullptr) return absl::FailedPreconditionError("the worker has no GPU");
  if (descriptors.empty() || descriptors.size() > 2 || arenas_->Find(add.arena()) != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena ", add.arena(), ": AddArena with a wrong number or descriptors"));
  }
  if (const absl::Status status = communicator_->GrowStaging(add.staging_bytes()); !status.ok()) {
    return status;
  }
  return arenas_->Add(add, std::move(descriptors), added, exported);
}

absl::Status CudaWorker::RemoveArena(std::uint64_t call, const worker::RemoveArena& remove) {
  if (launches_ == nullptr) return absl::FailedPreconditionError("the worker has no GPU");
  const auto removed = arenas_->Remove(call, remove.arena());
  if (!removed.ok()) return removed.status();
  launches_->Remove(removed->get());
  ready_waits_.Remove(removed->get());
  return absl::OkStatus();
}

absl::Status CudaWorker::AwaitReady(std::uint64_t call, const worker::AwaitReady& await) {
  if (launches_ == nullptr) return absl::FailedPreconditionError("the worker has no GPU");
  CudaReadyWait wait{call, await.layout(), await.step(), await.bucket(), {}};
  for (const std::uint64_t number : await.arenas()) {
    auto memory = arenas_->Find(number);
    if (memory == nullptr) continue;  // removed while the call was on its way
    if (wait.bucket >= memory->semaphores->buckets()) {
      return absl::InvalidArgumentError("a bucket beyond the end of an arena");
    }
    wait.ranks.push_back(std::move(memory));
  }
  ready_waits_.Add(std::move(wait));
  return absl::OkStatus();
}

absl::Status CudaWorker::Launch(std::uint64_t call, const worker::Launch& asked) {
  if (launches_ == nullptr) return absl::FailedPreconditionError("the worker has no GPU");
  CudaLaunch launch;
  launch.id = call;
  launch.layout = asked.layout();
  launch.step = asked.step();
  launch.bucket = asked.bucket();
  launch.dtype = static_cast<DataType>(asked.data_type());
  launch.staging_dtype = static_cast<DataType>(asked.staging_data_type());
  launch.offset = asked.offset();
  launch.count = asked.count();
  launch.scale = asked.scale();
  launch.void_contributions = asked.void_contributions();
  launch.measure = asked.measure();
  launch.step_buckets = asked.step_buckets();
  launch.verdict_offset = asked.verdict_offset();
  if (!CanBeStagedAs(launch.dtype, launch.staging_dtype) || launch.offset % kBucketAlignment != 0 ||
      launch.verdict_offset % alignof(float) != 0 ||
      (asked.arenas_size() > 0 &&
       !staging_->Holds(StagingBytes(launch.staging_dtype, launch.count)))) {
    return absl::InvalidArgumentError("a launch with a bucket that is misaligned or too large");
  }
  for (const std::uint64_t number : asked.arenas()) {
    auto memory = arenas_->Find(number);
    if (memory == nullptr) {
      ++launch.void_contributions;  // removed while the call was on its way
      continue;
    }
    const std::size_t bytes = launch.count * ItemSize(launch.dtype);
    if (launch.offset + bytes > memory->arena->bytes() ||
        launch.verdict_offset + sizeof(float) > memory->arena->bytes() ||
        launch.bucket >= memory->semaphores->buckets()) {
      return absl::InvalidArgumentError("a launch beyond the end of an arena");
    }
    launch.ranks.push_back(std::move(memory));
  }
  launches_->Submit(std::move(launch));
  return absl::OkStatus();
}

void CudaWorker::Advance() {
  if (remote_loss_.has_value()) {
    if (MonotonicNowNs() >= remote_loss_->until_ns) Fail(remote_loss_->why);
    return;
  }
  std::vector<CudaLaunchResult> finished;
  launches_->SetPaused(communicator_->connecting() || !postponed_.empty());
  absl::Status status;
  // A layout without an arena on this GPU may have larger buckets than the layouts with one.
  if (launches_->at_rest()) status = communicator_->GrowStaging(launches_->next_staging_bytes());
  const std::uint64_t before = launches_->advances();
  if (status.ok()) status = launches_->Advance(&finished);
  for (const CudaLaunchResult& result : finished) {
    worker::Reply reply;
    reply.set_call(result.id);
    worker::LaunchDone* const done = reply.mutable_launch_done();
    done->set_ready_ns(result.ready_ns);
    done->set_finish_ns(result.finish_ns);
    done->set_sum_of_squares(result.stats.sum_of_squares);
    done->set_non_finite(result.stats.non_finite);
    done->set_void_step(result.void_step);
    Reply(reply);
  }
  if (DetailsOf(status).reason == reason::kNcclRemoteLost) {
    remote_loss_ = {status, MonotonicNowNs() + kRemoteLossNs};
    return;
  }
  if (!status.ok()) Fail(WithFreeBytes(status));
  const std::vector<std::uint64_t> ready = ready_waits_.TakeReady();
  for (const std::uint64_t call : ready) {
    worker::Reply reply;
    reply.set_call(call);
    Reply(reply);
  }
  if (launches_->advances() != before || !ready.empty()) pace_.Restart(MonotonicNowNs());
  ReplyToRemovals(arenas_->FreeUntouched(*launches_));
  if (launches_->at_rest() && !postponed_.empty()) {
    for (Posted& posted : std::exchange(postponed_, {})) Handle(std::move(posted));
  }
}

void CudaWorker::ReplyToRemovals(const std::vector<std::uint64_t>& calls) const {
  if (calls.empty()) return;
  CheckGpu();
  for (const std::uint64_t call : calls) {
    worker::Reply reply;
    reply.set_call(call);
    Reply(reply);
  }
}

absl::StatusOr<std::string> CudaWorker::NewNcclId() {
  if (!nccl_.ok()) return WithoutNccl(nccl_.status());
  if (unused_ids_.size() >= kMostUnusedIds) {
    // The end of the process frees what NCCL keeps. The job's next worker begins anew.
    Fail(MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("the job's coordinator asks for another NCCL id, but ", unused_ids_.size(),
                     " ids of this worker never connected. The worker ends. Find out why the GPUs "
                     "do not connect")));
  }
  absl::StatusOr<std::string> id = NcclCommunicator::NewUniqueId(nccl_->get());
  if (id.ok()) unused_ids_.insert(*id);
  return id;
}

absl::Status CudaWorker::Connect(std::uint64_t call, const worker::Connect& connect) {
  if (!nccl_.ok()) return WithoutNccl(nccl_.status());
  if (launches_ == nullptr || !launches_->at_rest() || communicator_->exists()) {
    return absl::FailedPreconditionError("the worker has launches or is connected already");
  }
  NcclCommunicatorOptions options;
  options.unique_id = connecting_id_ = connect.unique_id();
  options.rank = static_cast<int>(connect.rank());
  options.ranks = static_cast<int>(connect.ranks());
  options.max_ctas = static_cast<int>(connect.max_ctas());
  options.algorithm = connect.algorithm();
  options.protocol = connect.protocol();
  const absl::Status status = communicator_->Connect(call, options, connect.limit_ns());
  return status.ok() ? status : WithFreeBytes(status);
}

void CudaWorker::AdvanceConnecting() {
  const auto connected = communicator_->AdvanceConnecting();
  if (!connected.has_value()) return;
  worker::Reply reply;
  reply.set_call(connected->call);
  if (connected->status.ok()) {
    launches_->SetCommunicator(communicator_->get());
    unused_ids_.erase(connecting_id_);
    reply.mutable_connected()->set_nccl_bytes(communicator_->nccl_bytes());
    reply.mutable_connected()->set_mps(context_->device().mps);
  } else {
    CheckGpu();
    *reply.mutable_error() = EncodeError(WithFreeBytes(connected->status));
    Disconnect().IgnoreError();  // the first error tells more
  }
  Reply(reply);
}

absl::Status CudaWorker::Disconnect() {
  if (communicator_ == nullptr || !communicator_->exists()) return absl::OkStatus();
  if (!launches_->at_rest()) return absl::FailedPreconditionError("the worker has launches");
  if (const auto call = communicator_->CancelConnecting(); call.has_value()) {
    worker::Reply reply;
    reply.set_call(*call);
    *reply.mutable_error() =
        EncodeError(absl::CancelledError("disconnected while it was connecting"));
    Reply(reply);
  }
  launches_->SetCommunicator(nullptr);
  communicator_->Abort();
  return absl::OkStatus();
}

worker::Pong CudaWorker::Memory() const {
  worker::Pong memory;
  if (launches_ == nullptr) return memory;
  arenas_->Count(&memory);
  const GpuBytes gpu = MemoryInfo();
  memory.set_staging_bytes(staging_->bytes());
  memory.set_context_bytes(context_bytes_);
  memory.set_nccl_bytes(communicator_->nccl_bytes());
  memory.set_free_bytes(gpu.free);
  memory.set_total_bytes(gpu.total);
  return memory;
}

void CudaWorker::Stop(std::uint64_t call) {
  // Launches that wait for a trainer's word are dropped. Those on the GPU finish by themselves;
  // this polls for them. If they do not, the daemon kills this process after its stop_limit.
  while (launches_ != nullptr && !launches_->at_rest()) {
    Advance();
    const timespec pause = Pause();
    nanosleep(&pause, nullptr);
  }
  launches_.reset();
  ready_waits_ = CudaReadyWaits();
  arenas_.reset();
  communicator_.reset();
  staging_.reset();
  combine_.reset();
  context_.reset();
  worker::Reply reply;
  reply.set_call(call);
  stopped_ = true;
  Reply(reply);
  _exit(0);  // the main thread is waiting for calls
}

void CudaWorker::Reply(const worker::Reply& reply, const UniqueFd* descriptor) const {
  const int fd = descriptor != nullptr ? descriptor->get() : -1;
  const absl::Span<const int> descriptors =
      descriptor != nullptr ? absl::MakeConstSpan(&fd, 1) : absl::Span<const int>();
  // Without the daemon this process has no purpose.
  if (!socket_->Send(reply, descriptors, MessageSocket::Wait::kYes).ok()) _exit(kExitFailed);
}

void CudaWorker::Fail(const absl::Status& why) const {
  worker::Reply failure;
  *failure.mutable_error() = EncodeError(why);
  Reply(failure);
  _exit(kExitFailed);
}

}  // namespace gradsync::daemon
