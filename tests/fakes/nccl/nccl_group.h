// The calls between ncclGroupStart and ncclGroupEnd, which take effect at the end. One per thread.

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
  // The first error; otherwise ncclInProgress if a nonblocking communicator has an operation in
  // progress.
  ncclResult_t End();

  // Without an open group, each takes effect at once. Within one, it returns ncclSuccess.
  ncclResult_t Init(std::shared_ptr<NcclCommunicator> communicator);
  ncclResult_t Launch(std::shared_ptr<NcclCommunicator> communicator, NcclCollective collective);
  // Requires that the communicator is flagged. So a group flags all of them before it frees any.
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
