#include "tests/gpu/nccl_rank.h"

#include <stdlib.h>

#include <string>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {

NcclRank::NcclRank(int rank, std::size_t floats)
    : rank_(rank), data_(fakes::MakeFloats(floats)), stream_(fakes::MakeStream()) {
  setenv("NCCL_HOSTID", ("rank-" + std::to_string(rank)).c_str(), /*overwrite=*/1);
  setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/1);
  // As the product does: all connections are made by Connect.
  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
}

ncclResult_t NcclRank::Connect(const ncclUniqueId& id) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t begun = ncclCommInitRankConfig(&communicator_, kRanks, id, rank_, &config);
  return begun == ncclSuccess || begun == ncclInProgress ? Settled() : begun;
}

ncclResult_t NcclRank::Begin(std::size_t count, ncclDataType_t type) {
  void* const buffer = reinterpret_cast<void*>(data_);
  return ncclAllReduce(buffer, buffer, count, type, ncclSum, communicator_,
                       reinterpret_cast<cudaStream_t>(stream_));
}

ncclResult_t NcclRank::AllReduce(std::size_t count, ncclDataType_t type) {
  const ncclResult_t begun = Begin(count, type);
  return begun == ncclSuccess || begun == ncclInProgress ? Settled() : begun;
}

ncclResult_t NcclRank::State() {
  ncclResult_t state = ncclInProgress;
  const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &state);
  return asked != ncclSuccess ? asked : state;
}

ncclResult_t NcclRank::Settled(int patience_ms) {
  ncclResult_t state = ncclInProgress;
  Await([&] { return (state = State()) != ncclInProgress; }, patience_ms);
  return state;
}

ncclResult_t NcclRank::Abort() {
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return result;
  result = ncclCommAbort(communicator_);
  const ncclResult_t ended = ncclGroupEnd();
  return result != ncclSuccess ? result : ended;
}

}  // namespace gradsync::gpu
