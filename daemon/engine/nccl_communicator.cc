#include "daemon/engine/nccl_communicator.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

ncclDataType_t NcclType(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return ncclFloat32;
    case DataType::kFloat64:
      return ncclFloat64;
    case DataType::kFloat16:
      return ncclFloat16;
    case DataType::kBfloat16:
      return ncclBfloat16;
    default:
      break;
  }
  return ncclNumTypes;
}

// An environment variable of this process that can be set, and set back to its first value.
class Variable {
 public:
  explicit Variable(const char* name) : name_(name) {
    if (const char* const value = std::getenv(name)) inherited_ = value;
  }
  void Set(const std::string& value) const {
    const std::string& wanted = value.empty() ? inherited_ : value;
    if (wanted.empty()) {
      unsetenv(name_);
    } else {
      setenv(name_, wanted.c_str(), /*overwrite=*/1);
    }
  }

 private:
  const char* const name_;
  std::string inherited_;
};

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

absl::StatusOr<std::string> NcclCommunicator::NewUniqueId(const NcclLibrary* nccl) {
  ncclUniqueId id;
  const absl::Status status =
      nccl->StatusOf(nccl->ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr);
  if (!status.ok()) return status;
  return std::string(id.internal, sizeof(id.internal));
}

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Connect(
    const NcclLibrary* nccl, const NcclCommunicatorOptions& options) {
  ncclUniqueId id;
  if (options.unique_id.size() != sizeof(id.internal)) {
    return absl::InvalidArgumentError(
        absl::StrCat("NCCL's ids have another size than ", options.unique_id.size(), " bytes"));
  }
  std::memcpy(id.internal, options.unique_id.data(), sizeof(id.internal));
  // Holds the size and version of this build's header, by which newer libraries know its fields.
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = options.blocking ? 1 : 0;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  static const Variable algorithm("NCCL_ALGO");
  static const Variable protocol("NCCL_PROTO");
  algorithm.Set(options.algorithm);
  protocol.Set(options.protocol);
  // Without this the first all-reduce connects. NCCL reads it once per process.
  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  auto communicator = std::unique_ptr<NcclCommunicator>(new NcclCommunicator(nccl));
  const ncclResult_t result = nccl->ncclCommInitRankConfig(
      &communicator->communicator_, options.ranks, id, options.rank, &config);
  const absl::Status status = nccl->StatusOf(result, "ncclCommInitRankConfig", nullptr);
  if (!status.ok()) return status;
  return communicator;
}

NcclCommunicator::~NcclCommunicator() { Abort(); }

absl::StatusOr<bool> NcclCommunicator::Settled() {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = nccl_->ncclCommGetAsyncError(communicator_, &state);
  absl::Status status = nccl_->StatusOf(result, "ncclCommGetAsyncError", communicator_);
  if (status.ok()) status = nccl_->StatusOf(state, "NCCL", communicator_);
  if (!status.ok()) return status;
  return state != ncclInProgress;
}

absl::Status NcclCommunicator::AllReduce(CUdeviceptr data, DataType dtype, std::size_t count,
                                         CUstream stream) {
  // A sum, since ncclAvg divides by the number of GPUs instead of trainers, and disables NVLink
  // SHARP.
  const ncclResult_t result = nccl_->ncclAllReduce(Pointer(data), Pointer(data), count,
                                                   NcclType(dtype), ncclSum, communicator_, stream);
  return nccl_->StatusOf(result, "ncclAllReduce", communicator_);
}

absl::Status NcclCommunicator::Register(CUdeviceptr address, std::size_t bytes) {
  const ncclResult_t result =
      nccl_->ncclCommRegister(communicator_, Pointer(address), bytes, &registration_);
  return nccl_->StatusOf(result, "ncclCommRegister", communicator_);
}

absl::Status NcclCommunicator::Deregister() {
  if (registration_ == nullptr) return absl::OkStatus();
  const ncclResult_t result =
      nccl_->ncclCommDeregister(communicator_, std::exchange(registration_, nullptr));
  return nccl_->StatusOf(result, "ncclCommDeregister", communicator_);
}

void NcclCommunicator::Abort() {
  if (communicator_ == nullptr) return;
  nccl_->ncclCommAbort(std::exchange(communicator_, nullptr));
}

void NcclCommunicator::Abort(absl::Span<const std::unique_ptr<NcclCommunicator>> communicators) {
  if (communicators.empty()) return;
  // Within a group, ncclCommAbort sets its communicator's flag at once and frees at the group's
  // end.
  const NcclLibrary* const nccl = communicators.front()->nccl_;
  nccl->ncclGroupStart();
  for (const auto& communicator : communicators) communicator->Abort();
  nccl->ncclGroupEnd();
}

absl::Status NcclCommunicator::AllocateMemory(const NcclLibrary* nccl, CUdeviceptr* address,
                                              std::size_t bytes) {
  void* memory = nullptr;
  const ncclResult_t result = nccl->ncclMemAlloc(&memory, bytes);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return nccl->StatusOf(result, "ncclMemAlloc", nullptr);
}

void NcclCommunicator::FreeMemory(const NcclLibrary* nccl, CUdeviceptr address) {
  nccl->ncclMemFree(Pointer(address));
}

}  // namespace gradsync::daemon
