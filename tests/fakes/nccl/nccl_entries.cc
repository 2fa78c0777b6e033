// The exported functions of NCCL's communicators, groups and collectives.

#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tests/fakes/machine/handle_table.h"
#include "tests/fakes/nccl/nccl_call_site.h"
#include "tests/fakes/nccl/nccl_communicator.h"
#include "tests/fakes/nccl/nccl_group.h"
#include "tests/fakes/nccl/nccl_process.h"
#include "tests/fakes/nccl/nccl_reduction.h"

namespace gradsync::fakes {
namespace {

constexpr unsigned int kConfigMagic = 0xcafebeef;

HandleTable<ncclComm_t, NcclCommunicator>& Communicators() {
  static auto* const communicators = new HandleTable<ncclComm_t, NcclCommunicator>;
  return *communicators;
}

// For an invalid or destroyed communicator: nullptr and a violation.
std::shared_ptr<NcclCommunicator> Find(ncclComm_t handle) {
  std::shared_ptr<NcclCommunicator> found = Communicators().Find(handle);
  if (found == nullptr) {
    NcclProcess::Get()->folder().Note(kViolation,
                                      "a communicator that does not exist (any more) is used");
  }
  return found;
}

// Runs `body` with the communicator, and counts it as a running call.
ncclResult_t With(
    ncclComm_t handle,
    const std::function<ncclResult_t(const std::shared_ptr<NcclCommunicator>&)>& body) {
  const std::shared_ptr<NcclCommunicator> communicator = Find(handle);
  if (communicator == nullptr) return NcclFailure(ncclInvalidArgument, "no such communicator");
  communicator->inside.fetch_add(1);
  const ncclResult_t result = body(communicator);
  communicator->inside.fetch_sub(1);
  return result;
}

// Like With, for calls that are refused while an operation is in progress.
ncclResult_t WithReady(
    ncclComm_t handle,
    const std::function<ncclResult_t(const std::shared_ptr<NcclCommunicator>&)>& body) {
  return With(handle, [&](const std::shared_ptr<NcclCommunicator>& communicator) {
    const ncclResult_t ready = communicator->EnsureReady();
    return ready == ncclSuccess ? body(communicator) : ready;
  });
}

// The settings of a new communicator, for the journal.
std::string Choices(const ncclConfig_t* config) {
  std::string choices = "maxCTAs=";
  const bool chosen = config != nullptr && config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
  choices += chosen ? std::to_string(config->maxCTAs) : "";
  for (const char* const name : {"NCCL_ALGO", "NCCL_PROTO"}) {
    const char* const value = std::getenv(name);
    choices += std::string(" ") + name + "=" + (value != nullptr ? value : "");
  }
  return choices;
}

ncclResult_t Init(ncclComm_t* handle, int ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  NcclProcess& process = *NcclProcess::Get();
  *handle = nullptr;
  if (config != nullptr && config->magic != kConfigMagic) {
    return NcclFailure(ncclInvalidArgument, "the config was not initialized");
  }
  if (ranks < 1 || ranks > kMaxNcclRanks || rank < 0 || rank >= ranks) {
    return NcclFailure(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                                std::to_string(ranks) + " is not offered");
  }
  NcclPort* const port = process.port();
  Context* const context = port == nullptr ? nullptr : port->Current();
  // Without a current context NCCL takes device 0. The fake fails, so that nothing relies on that.
  if (context == nullptr) return NcclFailure(ncclUnhandledCudaError, "no current context");
  const std::string name(id.internal, strnlen(id.internal, sizeof(id.internal)));
  auto rendezvous = NcclRendezvous::Open(process.folder(), name);
  if (rendezvous == nullptr) return NcclFailure(ncclInvalidArgument, "not a unique id");
  auto footprint =
      Allocation::Create(process.folder(), port->GpuOf(*context), MemoryKind::kCommunicator,
                         process.folder().machine().communicator_bytes);
  if (footprint == nullptr) return NcclFailure(ncclUnhandledCudaError, "out of memory");
  const bool blocking = config == nullptr || config->blocking != 0;
  process.folder().Note(kCommunicator, Choices(config));
  auto communicator = std::make_shared<NcclCommunicator>(
      &process, context, rank, ranks, blocking, std::move(rendezvous), std::move(footprint));
  *handle = Communicators().Add(communicator);
  return NcclGroup::OfThisThread().Init(std::move(communicator));
}

ncclResult_t Collect(ncclComm_t handle, NcclCall call, const void* from, void* to,
                     cudaStream_t stream, const Fault& fault) {
  return WithReady(handle, [&](const std::shared_ptr<NcclCommunicator>& communicator) {
    const std::size_t element = NcclTypeBytes(static_cast<ncclDataType_t>(call.datatype));
    if (element == 0) return NcclFailure(ncclInvalidArgument, "the fake lacks this type");
    if (fault.kind == Fault::Kind::kAsync) {
      communicator->SetAsyncError(static_cast<ncclResult_t>(fault.code));
    }
    const auto source = reinterpret_cast<CUdeviceptr>(from);
    const auto target = reinterpret_cast<CUdeviceptr>(to);
    const std::size_t bytes = call.count * element;
    const auto offset = communicator->OffsetInRegistered(source, bytes);
    call.registered = offset.has_value() && communicator->OffsetInRegistered(target, bytes) ? 1 : 0;
    call.offset = call.registered == 1 ? *offset : 0;
    return NcclGroup::OfThisThread().Launch(
        communicator, NcclCollective{call, source, target, reinterpret_cast<CUstream>(stream)});
  });
}

ncclResult_t Destroy(ncclComm_t handle) {
  const std::shared_ptr<NcclCommunicator> communicator = Find(handle);
  if (communicator == nullptr) return NcclFailure(ncclInvalidArgument, "no such communicator");
  if (const ncclResult_t ready = communicator->EnsureReady(); ready != ncclSuccess) return ready;
  // Finalizes the communicator first, unless it is finalized already.
  communicator->Finalize();
  Communicators().Remove(handle);
  communicator->Reclaim("ncclCommDestroy");
  return ncclSuccess;
}

ncclResult_t Abort(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  std::shared_ptr<NcclCommunicator> communicator = Find(handle);
  if (communicator == nullptr) return NcclFailure(ncclInvalidArgument, "no such communicator");
  Communicators().Remove(handle);
  communicator->FlagAbort();
  return NcclGroup::OfThisThread().Reclaim(std::move(communicator));
}

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  static NcclCallSite site("ncclGetVersion");
  return site.Run([&](const Fault&) {
    *version = NcclProcess::Get()->folder().machine().nccl_version;
    return ncclSuccess;
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static NcclCallSite site("ncclGetUniqueId");
  return site.Run([&](const Fault&) {
    const std::string name = NcclRendezvous::Create(NcclProcess::Get()->folder());
    if (name.empty()) return NcclFailure(ncclSystemError, "no rendezvous file");
    *id = {};
    std::memcpy(id->internal, name.data(), name.size());
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config) {
  static NcclCallSite site("ncclCommInitRankConfig");
  return site.Run([&](const Fault&) { return Init(comm, nranks, commId, rank, config); });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  static NcclCallSite site("ncclCommFinalize");
  return site.Run([&](const Fault&) {
    return WithReady(comm, [](const auto& communicator) { return communicator->Finalize(); });
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  static NcclCallSite site("ncclCommDestroy");
  return site.Run([&](const Fault&) { return Destroy(comm); });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  static NcclCallSite site("ncclCommAbort");
  return site.Run([&](const Fault&) { return Abort(comm); });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  static NcclCallSite site("ncclCommGetAsyncError");
  return site.Run([&](const Fault&) {
    return With(comm, [&](const auto& communicator) {
      *asyncError = communicator->Poll();
      return ncclSuccess;
    });
  });
}

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  static NcclCallSite site("ncclAllReduce");
  return site.Run([&](const Fault& fault) {
    if (op != ncclSum) return NcclFailure(ncclInvalidArgument, "the fake has sums only");
    const NcclCall call{static_cast<std::uint32_t>(datatype), 0, count, 0, 1, 0};
    return Collect(comm, call, sendbuff, recvbuff, stream, fault);
  });
}

ncclResult_t ncclGroupStart() {
  static NcclCallSite site("ncclGroupStart");
  return site.Run([](const Fault&) {
    NcclGroup::OfThisThread().Start();
    return ncclSuccess;
  });
}

ncclResult_t ncclGroupEnd() {
  static NcclCallSite site("ncclGroupEnd");
  return site.Run([](const Fault&) { return NcclGroup::OfThisThread().End(); });
}

// With a nonblocking communicator, this call too is refused while an operation is in progress.
ncclResult_t ncclCommRegister(ncclComm_t comm, void* buff, size_t size, void** handle) {
  static NcclCallSite site("ncclCommRegister");
  return site.Run([&](const Fault&) {
    return WithReady(comm, [&](const auto& communicator) {
      communicator->Register(buff, size);
      *handle = buff;
      return ncclSuccess;
    });
  });
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  static NcclCallSite site("ncclCommDeregister");
  return site.Run([&](const Fault&) {
    return WithReady(comm, [&](const auto& communicator) {
      return communicator->Deregister(handle) ? ncclSuccess
                                              : NcclFailure(ncclInvalidUsage, "not registered");
    });
  });
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) { return NcclLastError(); }

}  // extern "C"
