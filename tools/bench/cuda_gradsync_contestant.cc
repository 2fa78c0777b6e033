#include <cstdint>
#include <utility>

#include "tools/bench/clocks.h"
#include "tools/bench/cuda_contestants.h"
#include "tools/bench/cuda_rank.h"
#include "tools/bench/cuda_synchronizations.h"
#include "tools/bench/gradsync_contestant.h"

namespace gradsync::bench {
namespace {

class CudaGradsyncContestant final : public GradsyncContestant {
 public:
  using GradsyncContestant::GradsyncContestant;

  absl::Status Connect() override {
    absl::StatusOr<CudaSynchronizations> synchronizations =
        CudaSynchronizations::Count(options().cuda_library);
    if (!synchronizations.ok()) return synchronizations.status();
    synchronizations_ = *synchronizations;
    absl::StatusOr<std::unique_ptr<CudaRank>> gpu = CudaRank::Open(options());
    if (!gpu.ok()) return gpu.status();
    gpu_ = *std::move(gpu);
    return absl::OkStatus();
  }

  absl::Status SetUp(std::size_t bytes) override {
    absl::Status status = gpu_->AllocateHost(bytes);
    return status.ok() ? Join(bytes, gpu_->device().uuid) : status;
  }

  std::byte* buffer() override { return gpu_->host(); }
  absl::Status Upload() override { return gpu_->Upload(Address()); }
  absl::Status Download() override { return gpu_->Download(Address()); }

  absl::Status AllReduce(Turn* turn) override {
    const std::uint64_t before = synchronizations_.so_far();
    absl::Status status = layout().MarkReady(step(), kBucket, {gpu_->stream()});
    turn->marked_ns = MonotonicNs();
    if (status.ok()) status = layout().WaitOnStream(step(), kBucket, gpu_->stream());
    turn->enqueued_ns = MonotonicNs();
    turn->host_synchronizations = synchronizations_.so_far() - before;
    return status.ok() ? gpu_->Synchronize() : status;
  }

  absl::Status TearDown() override {
    absl::Status status = GradsyncContestant::TearDown();
    if (!status.ok()) return status;
    // Unmapping waits for the GPU. A counter that has not even seen that proves nothing.
    return synchronizations_.so_far() > 0
               ? absl::OkStatus()
               : absl::InternalError("the client's waits for its GPU were not counted");
  }

 private:
  CUdeviceptr Address() { return reinterpret_cast<CUdeviceptr>(layout().bucket(kBucket).data); }

  CudaSynchronizations synchronizations_;
  std::unique_ptr<CudaRank> gpu_;
};

}  // namespace

std::unique_ptr<Contestant> MakeCudaGradsyncContestant(const ContestantOptions& options) {
  return std::make_unique<CudaGradsyncContestant>(options);
}

}  // namespace gradsync::bench
