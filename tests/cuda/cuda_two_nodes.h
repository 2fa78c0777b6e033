// A job with layouts on GPUs of two nodes: two real daemons with their workers, and the client
// library, on fakes of the driver and of NCCL.

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
#include "tests/client/job_of_threads.h"
#include "tests/fakes/control.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync {

inline constexpr std::size_t kBuckets = 3;
inline constexpr std::size_t kCount = 1000;
inline constexpr absl::Duration kPatience = absl::Milliseconds(kPatienceMs);

// A rank with its GPU, its stream and its layout. Not thread-safe.
class GpuRank {
 public:
  explicit GpuRank(int gpu);

  Session& session() { return *session_; }
  Layout& layout() { return *layout_; }
  CUstream stream() const { return stream_; }
  // Makes the rank's context current in this thread.
  void Enter() const;

  // Calls OpenSession, then Register.
  absl::Status Join(const SessionOptions& options,
                    const LayoutSpec& spec = FloatBuckets(kBuckets, kCount));
  // Returns without waiting for other ranks.
  absl::Status OpenSession(const SessionOptions& options);
  // Returns when every rank has registered.
  absl::Status Register(LayoutSpec spec = FloatBuckets(kBuckets, kCount));
  // Ends the session without Leave, which releases the waits of its stream.
  void EndSession() { session_.reset(); }
  // Waits for the GPU, so no stream may be parked.
  void End();

  absl::Status Mark(std::uint64_t step, std::size_t bucket, float value);
  // The same, with gradients that the stream copies from the host. No stream may be parked.
  absl::Status Mark(std::uint64_t step, std::size_t bucket, const std::vector<float>& gradients);
  // A step, up to the stream's wait for the averages. The host does not wait. The gradients of
  // bucket b are `value` + b.
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
  int node;  // 0: alpha, the coordinator; 1: beta
  int gpu;   // number in the test's machine; nodes share none of these numbers
};

SessionOptions OptionsOf(const std::string& socket, const std::string& coordinator,
                         std::uint32_t rank, std::size_t world);

// A job over two nodes. All ranks are in this process. Join() may leave out one, which is then
// another process. On a real machine with one GPU (GpusThatMayBeOne) both nodes are on it: NCCL
// takes them for two machines.
class GpuNodes {
 public:
  explicit GpuNodes(std::vector<Place> places, const std::string& flag = "--worker_idle_limit=60s");

  fakes::FakeMachine& machine() { return machine_; }
  TestDaemon& node(int node) { return node == 0 ? alpha_ : beta_; }
  std::uint32_t world() const { return static_cast<std::uint32_t>(places_.size()); }
  GpuRank& rank(std::uint32_t rank) { return *ranks_[rank]; }
  std::string coordinator() { return alpha_.Status().peer_address(); }
  SessionOptions Options(std::uint32_t rank);

  // Applies from the next generation on.
  void set_nccl(const NcclSettings& nccl) { nccl_ = nccl; }
  void set_spec(const LayoutSpec& spec) { spec_ = spec; }
  void set_places(std::vector<Place> places);

  // Joins every rank except `absent`, which is another process.
  void Join(int absent = -1);
  void End();

  // Runs a step of every rank, with gradients `value`, `value` + 1, ..., and expects the averages.
  void AverageStep(std::uint64_t step, float value);
  void ExpectAverages(std::uint64_t step, float average);
  // Expects that `count` ranks of communicators were made so far. Only fakes count them.
  void ExpectConnections(std::uint64_t count, const char* why = "");

 private:
  fakes::FakeMachine machine_;
  TestDaemon alpha_;
  TestDaemon beta_;
  std::vector<Place> places_;
  NcclSettings nccl_;
  LayoutSpec spec_ = FloatBuckets(kBuckets, kCount);
  std::vector<std::unique_ptr<GpuRank>> ranks_;
};

}  // namespace gradsync

#endif  // TESTS_CUDA_CUDA_TWO_NODES_H_
