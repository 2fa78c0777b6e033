// When an all-reduce between GPUs may begin.

#ifndef DAEMON_WORKER_COLLECTIVE_GATE_H_
#define DAEMON_WORKER_COLLECTIVE_GATE_H_

namespace gradsync {

enum class CollectiveGate {
  // kNone where every GPU of the job is shared through MPS, else kAllNodes.
  kAuto,
  // When the gradients of every rank are there: no NCCL kernel waits for them on a GPU, where
  // without MPS it would take time slices from the trainers. Costs a call to each worker and its
  // reply.
  kAllNodes,
  // On each GPU when those of its own ranks are there.
  kNone,
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_COLLECTIVE_GATE_H_
