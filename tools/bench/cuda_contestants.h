// Implementations that reduce GPU memory. Rank r of a bench on g GPUs uses GPU r % g of those that
// its process sees.

#ifndef TOOLS_BENCH_CUDA_CONTESTANTS_H_
#define TOOLS_BENCH_CUDA_CONTESTANTS_H_

#include <memory>
#include <string>

#include "tools/bench/contestant.h"

namespace gradsync::bench {

//   roofline   rank 0 alone: copies within GPU 0, as many bytes as the reduction of its ranks moves
//   kernels    rank 0 alone: the reduction's kernels on as many buffers as GPU 0 has ranks
//   gradsync   gradsyncd and its workers
//   nccl       one communicator of all ranks
// Null for other names. Every call fails if CUDA's headers were missing at build time.
std::unique_ptr<Contestant> MakeCudaContestant(const std::string& name,
                                               const ContestantOptions& options);

// A rank of gradsync whose bucket lies on a GPU.
std::unique_ptr<Contestant> MakeCudaGradsyncContestant(const ContestantOptions& options);

// This contestant and the next show what one GPU does by itself with the buffers of its ranks. Rank
// 0 has them all, and is the only one that works. The GPU's clock measures the time.
//
// Combine and write-back, as a worker enqueues them. Every buffer holds rank 0's values.
std::unique_ptr<Contestant> MakeCudaKernelsContestant(const ContestantOptions& options);
// Copies of the driver between the same buffers. Combine and write-back of k buffers read k + 1 and
// write k + 1; so do k + 1 copies.
std::unique_ptr<Contestant> MakeCudaRooflineContestant(const ContestantOptions& options);

// NCCL in the trainers' own processes, as PyTorch's DDP uses it: by blocking communicators, whose
// calls return with the all-reduce on the stream. NCCL refuses two ranks on one GPU. With more
// ranks than GPUs, each rank plays a machine of its own, so they are connected by sockets.
std::unique_ptr<Contestant> MakeCudaNcclContestant(const ContestantOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CUDA_CONTESTANTS_H_
