// ncclGroupStart and ncclGroupEnd: what calls between them do at the end. One per thread; not
// shared.

#ifndef TESTS_FAKES_NCCL_NCCL_GROUP_H_
#define TESTS_FAKES_NCCL_NCCL_GROUP_H_

#include <nccl.h>

#include <map>
#include <memory>
#include <vector>

#include "tests/fakes/nccl/nccl_communicator.h"

namespace gradsync::fakes {

class NcclGroup {
 public:
  static NcclGroup& OfThisThread();

  void Start() { ++depth_; }
  // The first error; else ncclInProgress if a nonblocking communicator has something to do.
  ncclResult_t End();

  // Each is done at once if no group is open; ncclSuccess if one is.
  ncclResult_t Init(std::shared_ptr<NcclCommunicator> communicator);
  ncclResult_t Launch(std::shared_ptr<NcclCommunicator> communicator, NcclCollective collective);
  // For a communicator that is flagged already: so a group flags all before it frees any.
  ncclResult_t Reclaim(std::shared_ptr<NcclCommunicator> communicator);

 private:
  ncclResult_t Close();

  int depth_ = 0;
  std::vector<std::shared_ptr<NcclCommunicator>> initialized_;
  std::map<std::shared_ptr<NcclCommunicator>, std::vector<NcclCollective>> launched_;
  std::vector<std::shared_ptr<NcclCommunicator>> reclaimed_;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_NCCL_NCCL_GROUP_H_
