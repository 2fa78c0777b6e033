#include "tests/fakes/nccl/nccl_group.h"

#include <future>
#include <utility>

namespace gradsync::fakes {
namespace {

// An error takes precedence over ncclInProgress, which takes precedence over ncclSuccess.
ncclResult_t Worse(ncclResult_t one, ncclResult_t other) {
  if (one == ncclSuccess || (one == ncclInProgress && other != ncclSuccess)) return other;
  return one;
}

}  // namespace

NcclGroup& NcclGroup::OfThisThread() {
  thread_local NcclGroup group;
  return group;
}

ncclResult_t NcclGroup::End() {
  if (depth_ == 0) return NcclFailure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --depth_ == 0 ? Close() : ncclSuccess;
}

ncclResult_t NcclGroup::Init(std::shared_ptr<NcclCommunicator> communicator) {
  initialized_.push_back(std::move(communicator));
  return depth_ == 0 ? Close() : ncclSuccess;
}

ncclResult_t NcclGroup::Launch(std::shared_ptr<NcclCommunicator> communicator,
                               NcclCollective collective) {
  launched_[std::move(communicator)].push_back(collective);
  return depth_ == 0 ? Close() : ncclSuccess;
}

ncclResult_t NcclGroup::Reclaim(std::shared_ptr<NcclCommunicator> communicator) {
  reclaimed_.push_back(std::move(communicator));
  return depth_ == 0 ? Close() : ncclSuccess;
}

ncclResult_t NcclGroup::Close() {
  ncclResult_t result = ncclSuccess;
  // Several ranks of one process may wait for each other.
  std::vector<std::future<ncclResult_t>> inits;
  for (const auto& communicator : initialized_) {
    inits.push_back(
        std::async(std::launch::async, [communicator] { return communicator->Init(); }));
  }
  for (auto& init : inits) result = Worse(result, init.get());
  for (auto& [communicator, collectives] : launched_) {
    result = Worse(result, communicator->Launch(std::move(collectives)));
  }
  for (const auto& communicator : reclaimed_) communicator->Reclaim("ncclCommAbort");
  initialized_.clear();
  launched_.clear();
  reclaimed_.clear();
  return result;
}

}  // namespace gradsync::fakes
