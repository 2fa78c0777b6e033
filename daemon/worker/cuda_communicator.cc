#include "daemon/worker/cuda_communicator.h"

#include <algorithm>
#include <utility>

#include "absl/types/span.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

CudaCommunicator::CudaCommunicator(const NcclLibrary* nccl, CudaStagingPool* staging,
                                   Process process)
    : nccl_(nccl), staging_(staging), process_(std::move(process)) {}

CudaCommunicator::~CudaCommunicator() { Abort(); }

absl::Status CudaCommunicator::Connect(std::uint64_t call, const NcclCommunicatorOptions& options,
                                       std::uint64_t limit_ns) {
  const std::size_t free_before = process_.free_bytes();
  auto communicator = NcclCommunicator::Connect(nccl_, options);
  if (!communicator.ok()) return communicator.status();
  communicator_ = *std::move(communicator);
  connecting_ = {call, MonotonicNowNs() + limit_ns, free_before};
  return absl::OkStatus();
}

std::optional<CudaCommunicator::Connected> CudaCommunicator::AdvanceConnecting() {
  const auto settled = communicator_->Settled();
  absl::Status status = settled.status();
  if (settled.ok() && !*settled) {
    if (MonotonicNowNs() < connecting_->until_ns) return std::nullopt;
    status = MakeError(absl::StatusCode::kDeadlineExceeded, reason::kNcclTimeout,
                       "not every GPU of the job has connected in time");
  }
  if (status.ok()) status = MoveStagingToNccl();
  if (status.ok()) status = RegisterStaging();
  const Connecting connecting = *std::exchange(connecting_, std::nullopt);
  if (status.ok()) {
    nccl_bytes_ = connecting.free_before - std::min(connecting.free_before, process_.free_bytes());
  }
  return Connected{connecting.call, status};
}

std::optional<std::uint64_t> CudaCommunicator::CancelConnecting() {
  if (!connecting()) return std::nullopt;
  return std::exchange(connecting_, std::nullopt)->call;
}

void CudaCommunicator::Abort() {
  connecting_.reset();
  nccl_bytes_ = 0;
  if (!exists()) return;
  NcclCommunicator::Abort(absl::MakeConstSpan(&communicator_, 1));
  communicator_.reset();
}

absl::Status CudaCommunicator::MoveStagingToNccl() {
  if (staging_is_of_nccl_) return absl::OkStatus();
  const NcclLibrary* const nccl = nccl_;
  const absl::Status status = staging_->SetAllocator(
      {[nccl](CUdeviceptr* address, std::size_t bytes) {
         return NcclCommunicator::AllocateMemory(nccl, address, bytes);
       },
       [nccl](CUdeviceptr address) { NcclCommunicator::FreeMemory(nccl, address); }});
  staging_is_of_nccl_ = status.ok();
  return status;
}

absl::Status CudaCommunicator::RegisterStaging() {
  if (staging_->address() == 0) return absl::OkStatus();  // when it is reserved
  return communicator_->Register(staging_->address(), staging_->bytes());
}

absl::Status CudaCommunicator::GrowStaging(std::size_t bytes) {
  if (staging_->Holds(bytes)) return absl::OkStatus();
  // A communicator that is still connecting registers the memory once it is connected.
  if (get() == nullptr) return staging_->Reserve(bytes);
  absl::Status registered = communicator_->Deregister();
  const absl::Status grown = staging_->Reserve(bytes);
  // Also if it could not grow: NCCL requires the memory of all ranks to be registered, or of none.
  if (registered.ok()) registered = RegisterStaging();
  if (!registered.ok()) process_.fail(registered);
  return grown;
}

}  // namespace gradsync::daemon
