// A job whose layouts lie on GPUs of two nodes: two real daemons with their workers, and the
// client, on fakes of the driver and of NCCL.

#ifndef TESTS_CUDA_CUDA_TWO_NODES_H_
#define TESTS_CUDA_CUDA_TWO_NODES_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "tests/client/daemon_process.h"
#include "tests/fakes/control.h"
#include "tests/fault/deadline.h"
#include "tests/fault/test_daemon.h"

namespace gradsync {

inline constexpr std::size_t kBuckets = 3;
inline constexpr std::size_t kCount = 1000;
inline constexpr absl::Duration kPatience = absl::Milliseconds(fault::kPatienceMs);

// A rank with its GPU, its stream and its layout there. For one thread at a time.
class GpuRank {
 public:
  explicit GpuRank(int gpu);

  Session& session() { return *session_; }
  Layout& layout() { return *layout_; }
  CUstream stream() const { return stream_; }

  absl::Status Join(const SessionOptions& options,
                    LayoutSpec spec = FloatBuckets(kBuckets, kCount));
  // Without a Leave. What its stream waits for is released.
  void EndSession() { session_.reset(); }
  // Waits for the GPU, so only when no stream is parked there any more.
  void End();

  absl::Status Mark(std::uint64_t step, std::size_t bucket, float value);
  // The same with gradients that are on their way from the host; nothing may be parked.
  absl::Status Mark(std::uint64_t step, std::size_t bucket, const std::vector<float>& gradients);
  // A step, up to its stream's wait for the averages; nothing waits on the host. Bucket b has
  // gradients of `value` + b.
  absl::Status Step(std::uint64_t step, float value);
  std::vector<float> Read(std::size_t bucket);
  float Verdict(std::uint64_t step);
  absl::Status Wait(std::uint64_t step) { return layout_->WaitStep(step, kPatience).status(); }

 private:
  const int gpu_;
  CUcontext context_;
  CUstream stream_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Layout> layout_;
};

struct Place {
  int node;  // 0: alpha, which coordinates; 1: beta
  int gpu;   // of the machine: no two nodes have the same
};

SessionOptions OptionsOf(const std::string& socket, const std::string& coordinator,
                         std::uint32_t rank, std::size_t world);

// A job over two nodes. All ranks are of this process, but for one that Join() leaves out.
class GpuNodes {
 public:
  explicit GpuNodes(std::vector<Place> places, const std::string& flag = "--worker_idle_limit=60s");

  fakes::FakeMachine& machine() { return machine_; }
  fault::TestDaemon& node(int node) { return node == 0 ? alpha_ : beta_; }
  std::uint32_t world() const { return static_cast<std::uint32_t>(places_.size()); }
  GpuRank& rank(std::uint32_t rank) { return *ranks_[rank]; }
  std::string coordinator() { return alpha_.Status().peer_address(); }
  SessionOptions Options(std::uint32_t rank);

  // Of the lives that begin from now on.
  void set_nccl(const NcclSettings& nccl) { nccl_ = nccl; }
  void set_spec(const LayoutSpec& spec) { spec_ = spec; }
  void set_places(std::vector<Place> places);

  // Every rank but `absent`, which another process is.
  void Join(int absent = -1);
  void End();

  // A step of every rank: they have `value`, `value` + 1, ... and get the average.
  void AverageStep(std::uint64_t step, float value);
  void ExpectAverages(std::uint64_t step, float average);
  std::uint64_t Connections() { return machine_.Calls("ncclCommInitRankConfig"); }

 private:
  fakes::FakeMachine machine_;
  fault::TestDaemon alpha_;
  fault::TestDaemon beta_;
  std::vector<Place> places_;
  NcclSettings nccl_;
  LayoutSpec spec_ = FloatBuckets(kBuckets, kCount);
  std::vector<std::unique_ptr<GpuRank>> ranks_;
};

}  // namespace gradsync

#endif  // TESTS_CUDA_CUDA_TWO_NODES_H_
