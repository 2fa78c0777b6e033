// When an all-reduce between GPUs may begin.

#ifndef DAEMON_WORKER_COLLECTIVE_GATE_H_
#define DAEMON_WORKER_COLLECTIVE_GATE_H_

namespace gradsync::daemon {

enum class CollectiveGate {
  // kNone if every GPU of the job is shared through MPS, else kAllNodes.
  kAuto,
  // On all GPUs once the gradients of all ranks are ready. So no NCCL kernel waits on a GPU for
  // gradients: without MPS such a kernel would take time slices from the trainers. Costs one call
  // to each worker, and its reply.
  kAllNodes,
  // On each GPU once the gradients of that GPU's own ranks are ready.
  kNone,
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_COLLECTIVE_GATE_H_
