#include "tests/fakes/nccl/nccl_communicator.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "tests/fakes/nccl/nccl_reduction.h"

namespace gradsync::fakes {
namespace {

// The period in which a spinning kernel checks the other ranks.
constexpr std::chrono::microseconds kSpin(20);

// True if connections are made at the first collective. NCCL does so since 2.22, and reads the
// variable once per process.
bool ConnectsLazily() {
  static const char* const value = std::getenv("NCCL_RUNTIME_CONNECT");
  static const bool lazy = value == nullptr || std::string(value) != "0";
  return lazy;
}

// NCCL takes processes with different ids for processes of different machines.
std::uint64_t HostHash() {
  const char* const id = std::getenv("NCCL_HOSTID");
  return id == nullptr ? 0 : std::hash<std::string>()(id);
}

std::size_t BytesOf(const NcclCall& call) {
  return call.count * NcclTypeBytes(static_cast<ncclDataType_t>(call.datatype));
}

}  // namespace

NcclCommunicator::NcclCommunicator(NcclProcess* process, Context* context, int rank, int ranks,
                                   bool blocking, std::unique_ptr<NcclRendezvous> rendezvous,
                                   std::shared_ptr<Allocation> footprint)
    : process_(*process),
      port_(*process->port()),
      context_(context),
      rank_(rank),
      ranks_(ranks),
      blocking_(blocking),
      rendezvous_(std::move(rendezvous)),
      footprint_(std::move(footprint)),
      random_(process->folder().machine().seed + static_cast<std::uint64_t>(rank)) {}

ncclResult_t NcclCommunicator::Init() {
  return Start([this, lazy = ConnectsLazily()] {
    const ncclResult_t joined = Join();
    return joined == ncclSuccess && !lazy ? Connect() : joined;
  });
}

ncclResult_t NcclCommunicator::Finalize() {
  {
    daemon::MutexLock lock(&mutex_);
    if (finalized_) return NcclFailure(ncclInvalidArgument, "the communicator is finalized");
    finalized_ = true;
  }
  return Start([this] { return Leave(); });
}

// Runs `work` in this thread; for a nonblocking communicator in a thread of its own.
ncclResult_t NcclCommunicator::Start(const std::function<ncclResult_t()>& work) {
  if (blocking_) {
    const ncclResult_t result = work();
    if (result != ncclSuccess) SetAsyncError(result);
    return result;
  }
  {
    daemon::MutexLock lock(&mutex_);
    background_ = true;
  }
  std::thread([self = shared_from_this(), work] {
    const ncclResult_t result = work();
    if (result != ncclSuccess) self->SetAsyncError(result);
    daemon::MutexLock lock(&self->mutex_);
    self->background_ = false;
    self->idle_.NotifyAll();
  }).detach();
  return ncclInProgress;
}

ncclResult_t NcclCommunicator::Join() {
  // Init allocates memory and makes streams.
  port_.AwaitUnparked(*context_, "ncclCommInitRankConfig");
  NcclSlot& own = rendezvous_->slot(rank_);
  if (own.joined.load() != 0) {
    return NcclFailure(ncclInvalidUsage, "rank " + std::to_string(rank_) + " has joined twice");
  }
  own.pid = getpid();
  own.gpu = port_.GpuOf(*context_);
  own.host = HostHash();
  own.ranks = ranks_;
  own.joined.store(1);
  if (!SpinUntil([](const NcclSlot& slot) { return slot.joined.load() != 0; })) {
    return NcclFailure(ncclInternalError, "aborted while ranks join");
  }
  for (int i = 0; i < ranks_; ++i) {
    const NcclSlot& slot = rendezvous_->slot(i);
    if (slot.ranks != ranks_) {
      return NcclFailure(ncclInvalidArgument, "ranks disagree on their number");
    }
    for (int j = 0; j < i; ++j) {
      const NcclSlot& other = rendezvous_->slot(j);
      if (other.gpu != slot.gpu || other.host != slot.host) continue;
      return NcclFailure(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(j) +
                                               " and rank " + std::to_string(i) +
                                               " both on CUDA device " + std::to_string(slot.gpu));
    }
  }
  return ncclSuccess;
}

ncclResult_t NcclCommunicator::Leave() {
  std::shared_ptr<Operation> last;
  {
    daemon::MutexLock lock(&mutex_);
    last = last_;
  }
  port_.AwaitDone(last);
  rendezvous_->slot(rank_).leaving.store(1);
  return SpinUntil([](const NcclSlot& slot) { return slot.leaving.load() != 0; })
             ? ncclSuccess
             : NcclFailure(ncclInternalError, "aborted while ranks leave");
}

ncclResult_t NcclCommunicator::Connect() {
  auto taken =
      Allocation::Create(process_.folder(), port_.GpuOf(*context_), MemoryKind::kCommunicator,
                         process_.folder().machine().connection_bytes);
  if (taken == nullptr) return NcclFailure(ncclUnhandledCudaError, "out of memory");
  daemon::MutexLock lock(&mutex_);
  connection_ = std::move(taken);
  return ncclSuccess;
}

ncclResult_t NcclCommunicator::EnsureReady() {
  if (aborted_.load()) return NcclFailure(ncclInvalidArgument, "the communicator is aborted");
  if (const ncclResult_t error = async_error_.load(); error != ncclSuccess) return error;
  daemon::MutexLock lock(&mutex_);
  if (!background_ && late_.empty()) return ncclSuccess;
  return NcclFailure(ncclInvalidArgument,
                     "Attempt to use communicator before the previous "
                     "operation returned ncclSuccess");
}

ncclResult_t NcclCommunicator::Launch(std::vector<NcclCollective> collectives) {
  for (std::uint32_t i = 0; i < collectives.size(); ++i) {
    collectives[i].call.group_size = static_cast<std::uint32_t>(collectives.size());
    collectives[i].call.group_place = i;
  }
  bool first = false;
  {
    daemon::MutexLock lock(&mutex_);
    first = connection_ == nullptr;
  }
  const auto connect = [this] {
    port_.AwaitUnparked(*context_, "a first collective");
    return Connect();
  };
  const ncclResult_t begun = first ? Start(connect) : ncclSuccess;
  if (blocking_) return begun == ncclSuccess ? LaunchNow(collectives) : begun;
  daemon::MutexLock lock(&mutex_);
  late_ = std::move(collectives);
  const int most = std::max(1, process_.folder().machine().late_polls);
  polls_left_ = std::uniform_int_distribution<int>(1, most)(random_);
  return ncclInProgress;
}

ncclResult_t NcclCommunicator::Poll() {
  if (port_.Faulted()) return ncclUnhandledCudaError;
  if (const ncclResult_t error = async_error_.load(); error != ncclSuccess) return error;
  if (process_.folder().machine().nccl_reports_lost_ranks && ARankIsLost()) {
    SetAsyncError(ncclRemoteError);
    return ncclRemoteError;
  }
  std::vector<NcclCollective> due;
  {
    daemon::MutexLock lock(&mutex_);
    if (background_) return ncclInProgress;
    // Work that has ended meanwhile may have failed.
    if (const ncclResult_t error = async_error_.load(); error != ncclSuccess) return error;
    if (late_.empty()) return ncclSuccess;
    if (--polls_left_ > 0) return ncclInProgress;
    due = std::move(late_);
    late_.clear();
  }
  const ncclResult_t result = LaunchNow(due);
  if (result != ncclSuccess) SetAsyncError(result);
  return result;
}

void NcclCommunicator::SetAsyncError(ncclResult_t error) {
  ncclResult_t none = ncclSuccess;
  async_error_.compare_exchange_strong(none, error);
}

ncclResult_t NcclCommunicator::LaunchNow(const std::vector<NcclCollective>& collectives) {
  for (const NcclCollective& collective : collectives) {
    const std::size_t bytes = BytesOf(collective.call);
    daemon::MutexLock lock(&mutex_);
    const std::uint64_t sequence = ++launched_;
    auto launched = port_.Enqueue(context_, collective.stream, "ncclAllReduce",
                                  {{collective.from, bytes, false}, {collective.to, bytes, true}},
                                  last_, [self = shared_from_this(), sequence, collective] {
                                    return self->Run(sequence, collective);
                                  });
    if (launched == nullptr) {
      return NcclFailure(ncclUnhandledCudaError, "the stream cannot take a kernel");
    }
    last_ = std::move(launched);
  }
  return ncclSuccess;
}

CUresult NcclCommunicator::Run(std::uint64_t sequence, const NcclCollective& collective) {
  if (async_error_.load() != ncclSuccess) SpinUntilAborted();
  if (aborted_.load()) return CUDA_SUCCESS;
  const std::size_t bytes = BytesOf(collective.call);
  return bytes == 0 ? CUDA_SUCCESS : Exchange(sequence, collective, bytes);
}

CUresult NcclCommunicator::Exchange(std::uint64_t sequence, const NcclCollective& collective,
                                    std::size_t bytes) {
  NcclSlot& own = rendezvous_->slot(rank_);
  // Waits until all ranks have read the data of the previous collective.
  if (!SpinUntil([=](const NcclSlot& slot) { return slot.finished.load() + 1 >= sequence; })) {
    return CUDA_SUCCESS;
  }
  {
    const NcclRendezvous::Data data(*rendezvous_, rank_, bytes, true);
    if (data.get() == nullptr || !port_.Read(*context_, collective.from, data.get(), bytes)) {
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
  }
  own.call = collective.call;
  own.launched.store(sequence);
  if (!SpinUntil([=](const NcclSlot& slot) { return slot.launched.load() >= sequence; })) {
    return CUDA_SUCCESS;
  }
  std::vector<std::unique_ptr<NcclRendezvous::Data>> all;
  std::vector<const void*> contributions;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rendezvous_->slot(rank).call != collective.call) {
      process_.folder().Note(kViolation, "ranks " + std::to_string(rank_) + " and " +
                                             std::to_string(rank) + " differ in collective " +
                                             std::to_string(sequence));
      SetAsyncError(ncclInternalError);
      SpinUntilAborted();
      return CUDA_SUCCESS;
    }
    if (rendezvous_->slot(rank).call.offset != collective.call.offset) {
      process_.folder().Note(kViolation, "ranks " + std::to_string(rank_) + " and " +
                                             std::to_string(rank) +
                                             " differ in the offset of registered memory");
    }
    all.push_back(std::make_unique<NcclRendezvous::Data>(*rendezvous_, rank, bytes, false));
    contributions.push_back(all.back()->get());
  }
  std::vector<char> result(bytes);
  NcclSum(static_cast<ncclDataType_t>(collective.call.datatype), contributions,
          collective.call.count, result.data());
  own.finished.store(sequence);
  return port_.Write(*context_, result.data(), collective.to, bytes) ? CUDA_SUCCESS
                                                                     : CUDA_ERROR_ILLEGAL_ADDRESS;
}

bool NcclCommunicator::SpinUntil(const std::function<bool(const NcclSlot&)>& reached) {
  for (;;) {
    int count = 0;
    for (int rank = 0; rank < ranks_; ++rank) count += reached(rendezvous_->slot(rank)) ? 1 : 0;
    if (count == ranks_) return true;
    if (aborted_.load() || port_.Faulted()) return false;
    // NCCL's kernels spin without a pause. Here other threads need the core.
    std::this_thread::sleep_for(kSpin);
  }
}

void NcclCommunicator::SpinUntilAborted() {
  // Polls too: other processes write the word of a GPU's fault, and that wakes no thread.
  while (!aborted_.load() && !port_.Faulted()) std::this_thread::sleep_for(kSpin);
}

bool NcclCommunicator::ARankIsLost() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    const NcclSlot& slot = rendezvous_->slot(rank);
    if (slot.joined.load() != 0 && slot.leaving.load() == 0 && kill(slot.pid, 0) != 0 &&
        errno == ESRCH) {
      return true;
    }
  }
  return false;
}

void NcclCommunicator::Register(const void* buffer, std::size_t bytes) {
  daemon::MutexLock lock(&mutex_);
  const auto address = reinterpret_cast<CUdeviceptr>(buffer);
  if (registered_.count(address) == 0) process_.NoteRegistered(address);
  registered_[address] = bytes;
}

bool NcclCommunicator::Deregister(const void* buffer) {
  daemon::MutexLock lock(&mutex_);
  const auto address = reinterpret_cast<CUdeviceptr>(buffer);
  if (registered_.erase(address) == 0) return false;
  process_.NoteDeregistered(address);
  return true;
}

std::optional<std::uint64_t> NcclCommunicator::OffsetInRegistered(CUdeviceptr address,
                                                                  std::size_t bytes) {
  daemon::MutexLock lock(&mutex_);
  for (const auto& [begin, size] : registered_) {
    if (address >= begin && address + bytes <= begin + size) return address - begin;
  }
  return std::nullopt;
}

void NcclCommunicator::FlagAbort() {
  if (inside.load() > 0) {
    process_.folder().Note(kViolation, "ncclCommAbort while another thread is inside NCCL");
  }
  aborted_.store(true);
}

void NcclCommunicator::Reclaim(const char* call) {
  std::shared_ptr<Operation> last;
  {
    daemon::MutexLock lock(&mutex_);
    while (background_) idle_.Wait(&mutex_);
    late_.clear();
    last = last_;
  }
  // NCCL synchronizes its own stream, which waits for the caller's stream, and frees memory.
  port_.AwaitUnparked(*context_, call);
  port_.AwaitDone(last);
  daemon::MutexLock lock(&mutex_);
  footprint_.reset();
  connection_.reset();
  for (const auto& [address, bytes] : registered_) process_.NoteDeregistered(address);
  registered_.clear();
}

}  // namespace gradsync::fakes
